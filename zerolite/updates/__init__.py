"""Updates that are passed to the step: by torch's optimizers, and by sub-groups of offloaded tensors."""
