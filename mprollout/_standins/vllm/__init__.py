"""Import-only stand-in: on a machine without a GPU, SGLang imports a name from `vllm._custom_ops` and never calls it."""

__version__ = "0.0.0+standin"
