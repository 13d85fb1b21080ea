"""Stands for `apex.parallel`: the names that ampcompare drives."""

DistributedDataParallel = None
Reducer = None
SyncBatchNorm = None
convert_syncbn_model = None
