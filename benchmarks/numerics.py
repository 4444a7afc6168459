"""What canonical numerics cost: the step of benchmarks/speed.py with fast and with canonical numerics, in turns in one run.

    python -m benchmarks.numerics [--rounds 3]
"""

import argparse
import statistics

import torch

from benchmarks.speed import our_step, settings
from benchmarks.teams import Team, take_turns
from mtmegatron.device import choose_device
from mtmegatron.verify.canonical import canonical


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{choose_device('cpu').name}, torch {torch.__version__}, fp32, 8 sequences a step, one thread")
    fast = settings(1, 8)
    teams = [Team(name, our_step, 1, config) for name, config in (("fast", fast), ("canonical", canonical(fast)))]
    take_turns(teams, options.rounds, 1)
    base = statistics.median(teams[0].seconds)
    for team in teams:
        mine = statistics.median(team.seconds)
        print(f"{team.name:<12} {mine * 1e3:>9.0f} ms {mine / base:>7.1f} x {team.memory / 2**20:>7.0f} MB")
        team.close()


if __name__ == "__main__":
    main()
