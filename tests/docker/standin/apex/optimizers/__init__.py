"""Stands for `apex.optimizers`: the names that ampcompare drives."""

FusedAdagrad = None
FusedAdam = None
FusedLAMB = None
FusedNovoGrad = None
FusedSGD = None
