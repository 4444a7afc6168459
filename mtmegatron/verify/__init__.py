"""The proof that parallel equals serial: a pool of Gloo processes (`pool`) and the reference protocol (`protocol`)."""
