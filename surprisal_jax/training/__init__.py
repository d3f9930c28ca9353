"""Training: state, step, stages, and what they leave behind."""
