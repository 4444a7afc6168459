"""The plain PyTorch loop that ours is measured against: a Llama in eager modules, DDP, torch's fused AdamW, clip_grad_norm_."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mtmegatron.config.schema import Config


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ffn: int, eps: float):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    def __init__(self, vocab: int, layers: int, width: int, heads: int, ffn: int, sequence: int, eps: float):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads, ffn, eps) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps)
        size = width // heads
        angles = torch.arange(sequence)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def plain_step(rank: int, world: int, config: Config):
    """One training step on random tokens."""
    m, sequence, batch = config.model, config.data.sequence, config.train.micro_batch
    torch.manual_seed(0)
    model = Llama(m.vocab, m.layers, m.width, m.heads, m.ffn, sequence, m.norm_eps)
    trained = DistributedDataParallel(model) if world > 1 else model
    o = config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True)
    draw = torch.Generator().manual_seed(rank)

    def step() -> None:
        tokens = torch.randint(0, m.vocab, (batch, sequence + 1), generator=draw)
        logits = trained(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step
