"""Why an arm is faster or not, smaller or not: one step of it by phase, kind of work, memory and limits."""
