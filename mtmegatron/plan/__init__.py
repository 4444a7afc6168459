"""What a run will hold and send, on any number of devices, told without one: bytes by category (`account`), collectives (`collectives`)."""
