"""Row operations as Triton kernels: CUDA, or any device under ``TRITON_INTERPRET=1``. Imported only when chosen.

Every kernel upcasts right after a load and downcasts only in the store, so the interpreter, which has no bfloat16
arithmetic, runs the same numbers.
"""
