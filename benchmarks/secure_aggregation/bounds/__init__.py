"""A prototype: members prove to the coordinator that their masked vectors are short (decision 43)."""

import os

# The matrices are small. A second thread of BLAS only waits, which doubles the processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
