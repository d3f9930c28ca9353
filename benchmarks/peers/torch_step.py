"""The latent step in PyTorch, for `benchmarks.peers`: a process that trains when it is told to and says how long it
took. It needs torch and numpy alone.

`same` is the algorithm of this project: one prefix for all latents, logits in chunks that are computed again in the
backward pass, stored scores of the reference. `plain` is what one would write first: every latent's sequence whole, all
logits at once, the reference run in every step.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Parameters = dict[str, Tensor]
#: Keys and values [B, N, H, T, D].
Cache = tuple[Tensor, Tensor]


class Decoder:
    """RMSNorm, rotary positions, attention, SwiGLU, tied embeddings; parameters by their path in the checkpoint."""

    def __init__(self, parameters: Parameters, shape: dict[str, float]) -> None:
        self.parameters, self.shape = parameters, shape

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.parameters[f"{name}/scale"], self.shape["norm_epsilon"])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.shape["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = positions[..., None, :, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.split(half, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(
        self, tokens: Tensor, positions: Tensor, prefix: Sequence[Cache] | None = None
    ) -> tuple[Tensor, list[Cache]]:
        """Hidden states [B, N, T, W] of tokens [B, N, T], after a prefix that the N branches share."""
        x = F.embedding(tokens, self.parameters["embedding"])
        heads, length = int(self.shape["num_heads"]), tokens.shape[-1]
        caches: list[Cache] = []
        for layer in range(int(self.shape["num_layers"])):
            at = f"blocks/{layer}"
            normed = self.norm(x, f"{at}/attention_norm")
            query, key, value = (
                (normed @ self.parameters[f"{at}/attention/{name}/kernel"]).unflatten(-1, (heads, -1)).transpose(2, 3)
                for name in ("query", "key", "value")
            )
            query, key = self.rotate(query, positions), self.rotate(key, positions)
            caches.append((key, value))
            mask = None
            if prefix is not None:
                before = prefix[layer][0].shape[-2]
                key, value = (
                    torch.cat([shared.expand(-1, own.shape[1], -1, -1, -1), own], dim=-2)
                    for shared, own in zip(prefix[layer], (key, value), strict=True)
                )
                mask = torch.ones(length, before + length, dtype=torch.bool).tril(before)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
            x = x + mixed.transpose(2, 3).flatten(-2) @ self.parameters[f"{at}/attention/output/kernel"]
            normed = self.norm(x, f"{at}/mlp_norm")
            gate = F.silu(normed @ self.parameters[f"{at}/gate/kernel"])
            x = x + (gate * (normed @ self.parameters[f"{at}/up/kernel"])) @ self.parameters[f"{at}/down/kernel"]
        return self.norm(x, "norm"), caches


class Step:
    """Loss and update of one batch."""

    def __init__(self, inputs: dict[str, np.ndarray], shape: dict[str, float], plain: bool) -> None:
        self.shape, self.plain = shape, plain
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        self.networks = {
            network: {
                name.removeprefix(f"{network}/"): value.clone().requires_grad_()
                for name, value in tensors.items()
                if name.startswith(f"{network}/")
            }
            for network in ("model", "posterior")
        }
        reference = {n.removeprefix("reference/"): v for n, v in tensors.items() if n.startswith("reference/")}
        self.reference = Decoder(reference, shape)
        self.batch = {n.removeprefix("batch/"): v for n, v in tensors.items() if n.startswith("batch/")}
        self.scored = int(self.batch["suffix_loss_mask"][0].sum())
        self.weights = tensors["coefficients"]
        self.optimizers = {
            name: torch.optim.AdamW(
                list(parameters.values()), betas=(0.9, 0.99), eps=1e-8, weight_decay=shape["weight_decay"], fused=True
            )
            for name, parameters in self.networks.items()
        }
        self.done = 0
        self.loss: Callable[[], Tensor] = self.total

    def total(self) -> Tensor:
        batch, shape = self.batch, self.shape
        latents = int(shape["num_latents"])
        model = Decoder(self.networks["model"], shape)
        prefix, suffix = batch["prefix_tokens"].long(), batch["suffix_tokens"].long()
        rows, before = prefix.shape
        after = suffix.shape[1]
        ids = torch.arange(latents) + int(shape["first_latent_id"])
        branches = suffix[:, None].repeat(1, latents, 1)
        branches[..., 0] = ids
        # The tags share the positions of the last tokens before y.
        suffix_positions = (torch.arange(after) + before - 3).expand(rows, latents, after)
        prefix_positions = torch.arange(before).expand(rows, 1, before)
        if self.plain:
            tokens = torch.cat([prefix[:, None].expand(rows, latents, before), branches], dim=-1)
            positions = torch.cat([prefix_positions.expand(rows, latents, before), suffix_positions], dim=-1)
            hidden, _ = model.forward(tokens, positions)
            logits = hidden @ model.parameters["embedding"].T
            nll = F.cross_entropy(logits[:, :, before:-1].flatten(0, 2), branches[..., 1:].flatten(), reduction="none")
            nll = nll.view(rows, latents, -1)
            router = logits[:, 0, before - 1][:, ids].log_softmax(-1)
            with torch.no_grad():
                base = self.base_nll()
        else:
            shared, caches = model.forward(prefix[:, None], prefix_positions)
            hidden, _ = model.forward(branches, suffix_positions, caches)
            nll = self.chunked_nll(hidden[:, :, :-1], model.parameters["embedding"], branches[..., 1:])
            router = (shared[:, 0, -1] @ model.parameters["embedding"][ids].T).log_softmax(-1)
            base = batch["base_token_nll"]
        mask = batch["suffix_loss_mask"][:, 1:]
        nll = torch.where(mask[:, None], nll, 0.0)
        reconstruction = self.reconstruction(nll, base[:, -self.scored :], mask)
        network = Decoder({n.removeprefix("decoder/"): v for n, v in self.networks["posterior"].items()}, shape)
        z_free = batch["z_free_tokens"].long()
        pooled, _ = network.forward(z_free[:, None], torch.arange(z_free.shape[1]).expand(rows, 1, -1))
        scored = batch["z_free_loss_mask"][..., None]
        pooled = torch.where(scored, pooled[:, 0], 0.0).sum(1) / scored.sum(1)
        log_q = (pooled @ network.parameters["head/kernel"] + network.parameters["head/bias"]).log_softmax(-1)
        q = log_q.exp()
        return ((q * reconstruction).sum(-1) + shape["beta"] * (q * (log_q - router)).sum(-1)).mean()

    def reconstruction(self, nll: Tensor, base: Tensor, mask: Tensor) -> Tensor:
        """The coefficient-weighted six terms [B, K]; every supervised token of y has its score."""
        shape = self.shape
        b = torch.zeros(mask.shape)
        b[:, -base.shape[1] :] = base
        log_b = torch.where(mask, b.clamp_min(1e-30).log(), -math.inf)
        share = log_b.softmax(-1)
        inverse = torch.where(mask, -b.clamp_min(1e-6).log(), -math.inf).softmax(-1)
        uniform = mask / mask.sum(-1, keepdim=True)
        floor = 1e-3
        example, weighted, inversely = ((w * b).sum(-1)[:, None].clamp_min(floor) for w in (uniform, share, inverse))
        raw, token, inverse_token = ((w[:, None] * nll).sum(-1) for w in (uniform, share, inverse))
        terms = (raw, raw / shape["c_base"], raw / example, token, token / weighted, inverse_token / inversely)
        return torch.stack([weight * term for weight, term in zip(self.weights, terms, strict=True)]).sum(0)

    def chunked_nll(self, hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        size = int(self.shape["chunk_size"])

        def chunk(rows: Tensor, wanted: Tensor) -> Tensor:
            return F.cross_entropy(rows @ embedding.T, wanted, reduction="none")

        flat = zip(hidden.flatten(0, 2).split(size), targets.flatten().split(size), strict=True)
        return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in flat]).view(targets.shape)

    def base_nll(self) -> Tensor:
        tokens = self.batch["z_free_tokens"].long()
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), 1, -1)
        hidden, _ = self.reference.forward(tokens[:, None], positions)
        logits = hidden[:, 0, :-1] @ self.reference.parameters["embedding"].T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)

    def update(self) -> float:
        loss = self.loss()
        loss.backward()
        rate = self.learning_rate()
        for name, optimizer in self.optimizers.items():
            torch.nn.utils.clip_grad_norm_(self.networks[name].values(), self.shape["max_gradient_norm"])
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return float(loss.detach())

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        peak, warm, steps = (self.shape[name] for name in ("learning_rate", "warmup_steps", "steps"))
        if self.done < warm:
            return peak * self.done / warm
        part = min((self.done - warm) / (steps - warm), 1.0)
        return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part)))


def matmul_rate(size: int = 1024, repeats: int = 20) -> float:
    """Floating-point operations a second of a bare product."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = math.inf
    for _ in range(repeats):
        begun = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def main() -> None:
    path, form, way = sys.argv[1:]
    with np.load(path, allow_pickle=False) as stored:
        inputs = {name: stored[name] for name in stored.files if name != "shape"}
        shape = json.loads(str(stored["shape"]))
    torch.set_num_threads(int(shape["threads"]))
    step = Step(inputs, shape, plain=form == "plain")
    if way == "compile":
        step.loss = torch.compile(step.total)
    for line in sys.stdin:
        if line.strip() == "matmul":
            answer: dict[str, object] = {"rate": matmul_rate(), "torch": torch.__version__}
        else:
            begun = time.perf_counter()
            losses = [step.update() for _ in range(int(line))]
            answer = {"seconds": time.perf_counter() - begun, "losses": losses}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
