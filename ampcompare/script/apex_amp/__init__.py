"""Behind `apex.amp` of a script: what its `initialize`, `scale_loss` and steps do under an arm that is not Apex's."""
