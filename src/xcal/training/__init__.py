"""The training steps: clipped gradients, releases, evaluation."""
