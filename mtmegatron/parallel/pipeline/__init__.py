"""Pipeline parallelism: a schedule is data (schedule.py); the same lists are simulated, drawn and executed."""
