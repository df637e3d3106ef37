"""Updates that a step is passed: by torch's optimizers, and by sub-groups of what is offloaded."""
