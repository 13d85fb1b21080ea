"""The module from which scripts import the `SyncBatchNorm` of Apex without kernels; it is the only one here."""

from .optimized_sync_batchnorm import SyncBatchNorm as SyncBatchNorm
