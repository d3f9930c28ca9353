"""What a finished run is asked: decodes under each latent, the numbers of `summary.json`, the pictures."""
