"""The same work in another framework, in an environment of its own."""
