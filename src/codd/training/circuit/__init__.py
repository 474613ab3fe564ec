"""Training circuits: objectives, updates by flows or gradients, validation, and the trainer for the run loop."""
