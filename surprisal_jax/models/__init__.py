"""Flax NNX models, used functionally: split once, merged inside a pure function. They never import losses."""
