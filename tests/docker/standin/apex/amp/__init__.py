"""Stands for `apex.amp`: the names that ampcompare drives."""

_amp_state = None
disable_casts = None
initialize = None
load_state_dict = None
master_params = None
scale_loss = None
state_dict = None
