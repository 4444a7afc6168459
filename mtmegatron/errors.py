"""The one exception that says: the user can repair this.

`UserError` carries a message that is complete without a traceback: what is wrong, where, and the repair. The command line prints it and
exits with code 2. Anything else that escapes is our fault and keeps its traceback.
"""


class UserError(Exception):
    """A fault that the user can repair; its text is all that the user needs."""
