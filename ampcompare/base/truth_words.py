"""The words that a user may write for true and false: in an option, an arm or a variable of the environment."""

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
