"""Multi-token prediction: a chain of further blocks behind the model, of which the k-th predicts the token k further on than the model does.

Notable (DeepSeek-V3, 2412.19437, section 2.2, equations 21 to 25):
- depth k makes h^k_i = Block(M_k [norm(h^{k-1}_i); norm(Emb(t_{i+k}))]) and predicts t_{i+k+1} with the model's own output projection, behind a norm
  of its own. h^0 is what the model's last block gives, before its final norm. Embedding and output projection are the model's, not copies.
- The loss is main + coefficient / depths x sum_k CE_k. CE_k is the sum over the valid labels of depth k divided by their number in the global
  batch: a number of its own, since near the end of a document fewer labels exist. Label smoothing and the z term are those of the main loss.
- Tokens and labels are shifted when samples become a batch (`data/loader.py`), before ranks take their parts: no border between ranks is seen here.
- M_k is whole on every rank. Under sequence parallel each tensor rank multiplies its own tokens, so nothing is computed twice and nothing travels.
- Learned positions are not added again: h^{k-1} has them.
"""

from torch import Tensor, cat, nn

from mtmegatron.config.model import ModelConfig
from mtmegatron.layers.attention import Where
from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear
from mtmegatron.layers.norm import Norm
from mtmegatron.parallel.recompute import dropped


class Depth(nn.Module):
    """h^k = block(M [norm(h^{k-1}); norm(e)]), e the embeddings of the tokens k places further on. `norm` comes before the output projection.

    `block`: one of the model, whose number goes on from the model's last. Shapes: [T', D], [T', D] -> [T', D]."""

    def __init__(self, model: ModelConfig, block: nn.Module, build: Build):
        super().__init__()
        width, self.again = model.width, "norm" in build.recompute
        self.hidden_norm = Norm(model.norm, width, model.norm_eps, build)
        self.embedding_norm = Norm(model.norm, width, model.norm_eps, build)
        self.project = Linear(2 * width, width, build, split=None, bias=False, std=model.init_std)
        self.block = block
        self.norm = Norm(model.norm, width, model.norm_eps, build)

    @property
    def chain(self) -> list[nn.Module]:
        """What makes h^k: all but the norm before the output projection."""
        return [self.hidden_norm, self.embedding_norm, self.project, self.block]

    def forward(self, hidden: Tensor, embedded: Tensor, where: Where) -> Tensor:
        both = self._both(hidden, embedded)
        if self.again:
            both = dropped(both, self._both, hidden, embedded)
        return self.block(self.project(both).to(hidden.dtype), where)

    def _both(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return cat((self.hidden_norm(hidden), self.embedding_norm(embedded)), 1)
