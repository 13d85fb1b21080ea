"""What stands behind `apex.amp` and `torch.amp` of a script, for each kind of backend that can train one.

`BackendSpec.in_script` names the function of the file, which `ArmStandIn` calls with the arm and the
`ScriptProcessContext`.
"""
