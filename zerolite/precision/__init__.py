"""Dtypes of parameters, inputs and outputs, modules that stay in fp32, and the loss scale."""
