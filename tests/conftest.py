"""What holds for all tests."""

import signal

# A shell that starts a command in the background makes it ignore Ctrl-C, and so would all the
# processes that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
