"""The variables by which the libraries below torch take their number of threads."""

__all__ = ["THREAD_VARIABLES"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
