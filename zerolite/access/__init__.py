"""Access of users between steps: p.grad, and full gradients, master weights and states by parameter."""
