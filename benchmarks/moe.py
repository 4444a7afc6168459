"""Speed of experts: 8 of which a token takes 2, against the dense model with as many active parameters, and against Hugging Face's Mixtral.

    python -m benchmarks.moe [--rounds 6] [--steps 3] [--only dense|expert|huggingface|small|share]

Tokens a second as ratios in one run: one process against the dense model (feed-forward layers of twice an expert's width); two processes that share
the experts (data 2, expert 2) against one process with two threads, the same step; one process against transformers' MixtralForCausalLM in a plain
loop, with 8 sequences a step and with 1. Then which part of a step is routing: router, choice, counts, spread, combine and balance terms, from the profiler.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.speed import our_step
from benchmarks.teams import Team, take_turns
from mtmegatron.config.constraints import check
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.device import choose_device
from mtmegatron.layers import moe
from mtmegatron.models.size import training_flops
from mtmegatron.parallel import expert

EXPERTS, TOP_K, FFN, SEQUENCES = 8, 2, 768, 8
MOE = {"experts": EXPERTS, "top_k": TOP_K, "ffn": FFN, "score_after": True, "aux_loss": 0.01}


def settings(world: int = 1, experts: bool = True, sequences: int = SEQUENCES, **parallel: object) -> Config:
    """Width 256, 4 layers, 8 heads, vocabulary 2,048, sequence 256, experts of 768."""
    model = {"layers": 4, "width": 256, "heads": 8, "ffn": TOP_K * FFN, "vocab": 2048} | ({"moe": MOE} if experts else {})
    tree = {
        "model": model, "data": {"sequence": 256}, "optimizer": {"lr": 1e-3, "clip": 1.0, "weight_decay": 0.1}, "parallel": parallel,
        "train": {"micro_batch": sequences // world, "global_batch": sequences, "steps": 1_000_000},
    }  # fmt: skip
    return check(validate(tree, "benchmark"), world)


def hugging_face_step(rank: int, world: int, config: Config):
    """One step of transformers' Mixtral of the same shape, as people write the loop."""
    from transformers import MixtralConfig, MixtralForCausalLM

    m, sequence = config.model, config.data.sequence
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=m.vocab, hidden_size=m.width, intermediate_size=FFN, num_hidden_layers=m.layers, num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, max_position_embeddings=sequence,
        output_router_logits=True, router_aux_loss_coef=MOE["aux_loss"], sliding_window=None, tie_word_embeddings=False,
    ))  # fmt: skip
    o = config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True)
    draw = torch.Generator().manual_seed(rank)

    def step() -> None:
        tokens = torch.randint(0, m.vocab, (config.train.micro_batch, sequence), generator=draw)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def pairs() -> dict[str, Callable[[], tuple[Team, Team, str]]]:
    """What starts (ours, what it is measured against, the target), by the word of `--only`."""
    one, small = settings(), settings(sequences=1)
    return {
        "dense": lambda: (Team("experts", our_step, 1, one), Team("dense, equal active parameters", our_step, 1, settings(experts=False)), "0.7"),
        "expert": lambda: (Team("expert=2", our_step, 2, settings(2, data=2, expert=2)), Team("one process, 2 threads", our_step, 1, one, 2), "0.75"),
        "huggingface": lambda: (Team("experts", our_step, 1, one), Team("transformers' Mixtral", hugging_face_step, 1, one), "1"),
        "small": lambda: (Team("1 sequence", our_step, 1, small), Team("transformers' Mixtral", hugging_face_step, 1, small), "1"),
    }


def measure(word: str, rounds: int, steps: int) -> None:
    ours, other, target = pairs()[word]()
    take_turns([ours, other], rounds, steps)
    mine, theirs = (statistics.median(team.seconds) for team in (ours, other))
    memory = [team.memory / 2**20 for team in (ours, other)]
    print(
        f"{ours.name:<10} {mine * 1e3:>7.0f} ms {memory[0]:>6.0f} MB   {other.name:<31} {theirs * 1e3:>7.0f} ms {memory[1]:>6.0f} MB   "
        f"ratio {theirs / mine:.2f} (target {target})", flush=True,
    )  # fmt: skip
    for team in (ours, other):
        team.close()


ROUTING = {moe: ("linear", "route", "balance_losses", "sums", "observe"), expert: ("bin_counts", "sort_slots", "spread", "combine", "all_counts")}
# nodes of the graph that only routing has; the input gradient of the router's product is small and not told from other products
BACKWARD = ("_Spread", "_Combine", "_SumOver", "_Observed", "Softmax", "Gather")
NODES = {f"autograd::engine::evaluate_function: {name}Backward{end}" for name in BACKWARD for end in ("", "0")}


def named(function, label: str):
    """The function, its time recorded as routing."""

    def run(*given, **more):
        with record_function(label):
            return function(*given, **more)

    return run


def share(steps: int) -> None:
    """Part of a step's time that goes to routing, forward and backward."""
    step = our_step(0, 1, settings())
    for module, names in ROUTING.items():
        for name in names:
            setattr(module, name, named(getattr(module, name), "routing"))
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            with record_function("step"):
                step()
    rows = {row.key: row for row in seen.key_averages()}
    routed = rows["routing"].cpu_time_total + sum(row.cpu_time_total for key, row in rows.items() if key in NODES)
    total = rows["step"].cpu_time_total
    print(f"routing: {routed / total:.1%} of a step of {total / steps / 1e3:.0f} ms under the profiler (target below 15%)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=("dense", "expert", "huggingface", "small", "share"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{choose_device('cpu').name}, torch {torch.__version__}, two cores, fp32")
    flops = [training_flops(settings(experts=experts).model, 256) for experts in (True, False)]
    print(f"FLOPs of a token: experts {flops[0]:.3g}, dense {flops[1]:.3g}")
    for word in pairs():
        if options.only in (None, word):
            measure(word, options.rounds, options.steps * (8 if word == "small" else 1))
    if options.only in (None, "share"):
        share(options.steps)


if __name__ == "__main__":
    main()
