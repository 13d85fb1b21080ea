"""Run a function or a module in a child process, so that a crash or a hang there is an answer too."""
