"""One direction of an LSTM layer, which can also be unrolled for DP-SGD.

Hochreiter and Schmidhuber 1997 with forget gates (Gers et al. 2000), gates in torch's order i, f, g, o:

    a_t = W_ih x_t + W_hh h_(t-1) + b        h_0 = c_0 = 0
    c_t = sigmoid(f) * c_(t-1) + sigmoid(i) * tanh(g)
    h_t = sigmoid(o) * tanh(c_t)

There is one bias: nn.LSTM's two have the same gradient, and would be sent twice and noised twice.

Plain training and export run torch's fused layer. An observed layer runs unrolled instead, with the same parameters
and, up to float32's rounding, the same states. It computes all W_ih x_t + b at once, where the gradient of the loss is
the one at a_t. So the weights' gradients are those of linear layers over positions, sum_t g_t x_t^T and sum_t g_t
h_(t-1)^T, and can be told apart by example in the same way (`learning.training.clipping`). Opacus' DPLSTM uses the same
idea, with a linear layer and a hook in every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LSTM", "Observed"]

# Called with x (B, S, width) and h_(t-1) (B, S, hidden), both without a graph, and W_ih x_t + b (B, S, 4 hidden), with
# its graph.
Observed = Callable[[Tensor, Tensor, Tensor], None]


class LSTM(nn.Module):
    """Turns vectors (B, S, width) into states (B, S, hidden), from first to last. Weights are zero until set."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight_ih = nn.Parameter(torch.zeros(4 * hidden, width))
        self.weight_hh = nn.Parameter(torch.zeros(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        self._observer: Observed | None = None

    def observe(self, observer: Observed | None) -> None:
        """Unrolls every later call and shows it to the observer; None makes calls fused again."""
        self._observer = observer

    def forward(self, vectors: Tensor) -> Tensor:
        """States h_t, (B, S, hidden)."""
        if self._observer is not None:
            inputs = functional.linear(vectors, self.weight_ih, self.bias)
            states = _unrolled(inputs, self.weight_hh)
            before = functional.pad(states.detach()[:, :-1], (0, 0, 1, 0))
            self._observer(vectors.detach(), before, inputs)
            return states
        if torch.onnx.is_in_onnx_export():
            return self._onnx(vectors)
        nothing = vectors.new_zeros(1, vectors.shape[0], self.hidden)
        weights = [self.weight_ih, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
        # Without this flag, CUDA keeps nothing for a backward pass. It changes no number, because there is no dropout.
        keeps = torch.is_grad_enabled()
        states, _, _ = torch.lstm(vectors, (nothing, nothing), weights, True, 1, 0.0, keeps, False, True)
        return states

    def _onnx(self, vectors: Tensor) -> Tensor:
        """The states by ONNX's own operator, with gates i, o, f, g.

        Torch's would be exported position by position, and for one length only.
        """
        order = [self._in_onnx_order(each) for each in (self.weight_ih, self.weight_hh, self.bias)]
        batch, length = vectors.shape[:2]
        # X of shape (S, B, width) gives Y of shape (S, directions, B, hidden). B includes nn.LSTM's second bias.
        states = torch.onnx.ops.symbolic(
            "LSTM",
            [vectors.transpose(0, 1), order[0], order[1], functional.pad(order[2], (0, 4 * self.hidden))],
            {"hidden_size": self.hidden, "direction": "forward"},
            dtype=vectors.dtype,
            shape=[length, 1, batch, self.hidden],
        )
        return states.squeeze(1).transpose(0, 1)

    def _in_onnx_order(self, parameter: Tensor) -> Tensor:
        i, f, g, o = parameter.chunk(4)
        return torch.cat([i, o, f, g])[None]


def _unrolled(inputs: Tensor, weight_hh: Tensor) -> Tensor:
    """States (B, S, hidden) from W_ih x_t + b, (B, S, 4 hidden), position by position."""
    state = cell = inputs.new_zeros(inputs.shape[0], weight_hh.shape[1])
    states = []
    for step in inputs.unbind(dim=1):
        i, f, g, o = torch.addmm(step, state, weight_hh.T).chunk(4, dim=1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
        states.append(state)
    return torch.stack(states, dim=1)
