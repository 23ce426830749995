"""From problems to rollouts: the data module, the engines, and what passes between them."""
