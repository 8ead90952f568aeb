"""Kernel tests run on any machine: without a GPU the Triton kernels run in its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    # Read when a kernel is first imported, so it must be set before any test module is.
    os.environ.setdefault("TRITON_INTERPRET", "1")
