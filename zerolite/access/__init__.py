"""Access of users between steps: p.grad, and whole gradients, master weights and states by parameter."""
