"""Exit codes of the command line, beside those of the programs it runs."""

FAILED, USAGE = 1, 2
TIMED_OUT, NOT_RUN = 124, 125  # of `run` and `exec`: as `timeout` and `docker` say it
SIGNALED = 128  # and the signal's number
INTERRUPTED, BROKEN_PIPE = 130, 141
