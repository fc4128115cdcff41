#!/usr/bin/env python3
"""Creates the golden files beside this script: PyTorch's results, with which our tests compare.

    sudo apt install python3-torch            # PyTorch 1.13 of Debian 12; no network is needed to run
    /usr/bin/python3 tests/golden/make_golden.py

README.md says what is in each file.
"""

import json
import math
import os
import struct

import torch
import torch.nn.functional as F

FOLDER = os.path.dirname(os.path.abspath(__file__))
STEPS, BATCH, TIME = 50, 4, 16
ADAMW = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}


def save(name, tensors, metadata):
    """Writes a safetensors file: header length, JSON header, then the bytes of the tensors."""
    dtypes = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}
    header, chunks, offset = {"__metadata__": metadata}, [], 0
    for key, tensor in sorted(tensors.items()):
        chunk = tensor.detach().contiguous().numpy().tobytes()
        header[key] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape),
                       "data_offsets": [offset, offset + len(chunk)]}
        chunks.append(chunk)
        offset += len(chunk)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(FOLDER, name), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(chunks))
    print(f"{name}: {len(tensors)} tensors, {8 + len(text) + offset} bytes")


# ---- models: functions of a dictionary of weights with Hugging Face's names and shapes ----

def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary_angles(length, size, base, dtype):
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.cat((angles, angles), dim=-1).to(dtype)  # (length, size)


def rotary(x, base=10000.0):
    angles = rotary_angles(x.size(-2), x.size(-1), base, x.dtype)
    return x * angles.cos() + rotate_half(x) * angles.sin()


def attention(q, k, v, causal, mask=None):
    """q (batch, heads, queries, size), k and v with heads or fewer; causal aligned bottom-right."""
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores + mask
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        visible = visible.tril(k.size(2) - q.size(2))
    weights = torch.where(visible, scores, torch.full_like(scores, -1e30)).softmax(dim=-1)
    return torch.where(visible, weights, torch.zeros_like(weights)) @ v  # a query that sees nothing gives zeros


def heads_of(x, heads):
    return x.view(x.size(0), x.size(1), heads, -1).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(x.size(0), x.size(2), -1)


GPT2 = {"vocabulary": 65, "context": 16, "width": 32, "heads": 2, "layers": 2, "layer_norm_epsilon": 1e-5}


def gpt2_weights():
    c, width = GPT2, GPT2["width"]
    w = {"transformer.wte.weight": torch.randn(c["vocabulary"], width) * 0.1,
         "transformer.wpe.weight": torch.randn(c["context"], width) * 0.1}
    for layer in range(c["layers"]):
        p = f"transformer.h.{layer}."
        for name, inputs, outputs in (("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width),
                                      ("mlp.c_fc", width, 4 * width), ("mlp.c_proj", 4 * width, width)):
            w[p + name + ".weight"] = torch.randn(inputs, outputs) * 0.1
            w[p + name + ".bias"] = torch.randn(outputs) * 0.02
        for name in ("ln_1", "ln_2"):
            w[p + name + ".weight"] = 1 + torch.randn(width) * 0.05
            w[p + name + ".bias"] = torch.randn(width) * 0.05
    w["transformer.ln_f.weight"] = 1 + torch.randn(width) * 0.05
    w["transformer.ln_f.bias"] = torch.randn(width) * 0.05
    return w


def gpt2(w, ids):
    c = GPT2

    def norm(x, name):
        return F.layer_norm(x, (c["width"],), w[name + ".weight"], w[name + ".bias"], c["layer_norm_epsilon"])

    def project(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:ids.size(1)]
    for layer in range(c["layers"]):
        p = f"transformer.h.{layer}."
        q, k, v = project(norm(x, p + "ln_1"), p + "attn.c_attn").split(c["width"], dim=2)
        y = attention(*(heads_of(t, c["heads"]) for t in (q, k, v)), causal=True)
        x = x + project(joined(y), p + "attn.c_proj")
        hidden = F.gelu(project(norm(x, p + "ln_2"), p + "mlp.c_fc"), approximate="tanh")
        x = x + project(hidden, p + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T  # tied head


LLAMA = {"vocabulary": 96, "context": 16, "width": 32, "hidden": 80, "heads": 4, "kv_heads": 2, "layers": 2,
         "rms_norm_epsilon": 1e-6, "rope_theta": 10000.0}


def llama_weights():
    c, width = LLAMA, LLAMA["width"]
    kv_width = width // c["heads"] * c["kv_heads"]
    w = {"model.embed_tokens.weight": torch.randn(c["vocabulary"], width) * 0.1}
    for layer in range(c["layers"]):
        p = f"model.layers.{layer}."
        for name, outputs, inputs in (("self_attn.q_proj", width, width), ("self_attn.k_proj", kv_width, width),
                                      ("self_attn.v_proj", kv_width, width), ("self_attn.o_proj", width, width),
                                      ("mlp.gate_proj", c["hidden"], width), ("mlp.up_proj", c["hidden"], width),
                                      ("mlp.down_proj", width, c["hidden"])):
            w[p + name + ".weight"] = torch.randn(outputs, inputs) * 0.1
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[p + name + ".weight"] = 1 + torch.randn(width) * 0.05
    w["model.norm.weight"] = 1 + torch.randn(width) * 0.05
    w["lm_head.weight"] = torch.randn(c["vocabulary"], width) * 0.1
    return w


def rms_norm(x, weight, epsilon):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def llama(w, ids):
    c = LLAMA
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(c["layers"]):
        p = f"model.layers.{layer}."
        y = rms_norm(x, w[p + "input_layernorm.weight"], c["rms_norm_epsilon"])
        q = heads_of(y @ w[p + "self_attn.q_proj.weight"].T, c["heads"])
        k = heads_of(y @ w[p + "self_attn.k_proj.weight"].T, c["kv_heads"])
        v = heads_of(y @ w[p + "self_attn.v_proj.weight"].T, c["kv_heads"])
        y = attention(rotary(q, c["rope_theta"]), rotary(k, c["rope_theta"]), v, causal=True)
        x = x + joined(y) @ w[p + "self_attn.o_proj.weight"].T
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"], c["rms_norm_epsilon"])
        y = F.silu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)
        x = x + y @ w[p + "mlp.down_proj.weight"].T
    return rms_norm(x, w["model.norm.weight"], c["rms_norm_epsilon"]) @ w["lm_head.weight"].T


def text(vocabulary):
    """Learnable tokens: each follows from the one before, with some noise. (steps, batch, time + 1)"""
    rows = torch.empty(STEPS, BATCH, TIME + 1, dtype=torch.int64)
    rows[:, :, 0] = torch.randint(vocabulary, (STEPS, BATCH))
    for i in range(TIME):
        follow = (rows[:, :, i] * 5 + 3) % vocabulary
        noise = torch.randint(vocabulary, (STEPS, BATCH))
        rows[:, :, i + 1] = torch.where(torch.rand(STEPS, BATCH) < 0.9, follow, noise)
    return rows


def train(model, weights, tokens, dtype):
    w = {name: tensor.to(dtype).clone().requires_grad_() for name, tensor in weights.items()}
    groups = [{"params": [t for t in w.values() if t.dim() >= 2], "weight_decay": ADAMW["weight_decay"]},
              {"params": [t for t in w.values() if t.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["learning_rate"], betas=(ADAMW["beta1"], ADAMW["beta2"]),
                                  eps=ADAMW["epsilon"])
    losses, first_logits = [], None
    for ids in tokens:
        logits = model(w, ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if first_logits is None:
            first_logits = logits.detach().clone()
            first_gradients = {name: tensor.grad.clone() for name, tensor in w.items()}
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), first_logits, first_gradients


def model_file(name, model, weights, config):
    tokens = text(config["vocabulary"])
    losses, logits, _ = train(model, weights, tokens, torch.float32)
    exact_losses, exact_logits, gradients = train(model, weights, tokens, torch.float64)
    noise = ((losses - exact_losses) / exact_losses).abs().max().item()
    print(f"{name}: loss {exact_losses[0]:.6f} -> {exact_losses[-1]:.6f}, f32 differs from f64 by {noise:.2g} at most")
    tensors = {"weights." + key: tensor for key, tensor in weights.items()}
    # The norm of each gradient of the first step shows which part of a model is wrong when the losses do not agree.
    tensors.update({"gradient_norm." + key: tensor.norm() for key, tensor in gradients.items()})
    tensors.update({"tokens": tokens, "losses_f32": losses, "losses_f64": exact_losses, "logits_f64": exact_logits})
    save(name, tensors, {"config": json.dumps(config), "adamw": json.dumps(ADAMW), "torch": torch.__version__,
                         "largest_relative_difference_f32_f64": f"{noise:.3g}"})


# ---- ops: inputs, an upstream gradient dy, the output y and the gradients d<input>, all in f64 ----

class Cases:
    def __init__(self):
        self.tensors, self.options = {}, {}

    def add(self, name, function, inputs, fixed=None, **options):
        """inputs get gradients, fixed do not; function takes both by name."""
        leaves = {key: tensor.double().clone().requires_grad_() for key, tensor in inputs.items()}
        y = function(**leaves, **(fixed or {}))
        dy = torch.randn(y.shape, dtype=torch.float64)
        y.backward(dy)
        for key, tensor in leaves.items():
            self.tensors[f"{name}.{key}"] = tensor
            self.tensors[f"{name}.d{key}"] = tensor.grad
        for key, tensor in (fixed or {}).items():
            self.tensors[f"{name}.{key}"] = tensor
        self.tensors[f"{name}.y"], self.tensors[f"{name}.dy"] = y, dy
        self.options[name] = json.dumps(options)


def op_file():
    cases = Cases()

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    wide = torch.linspace(-6, 6, 41, dtype=torch.float64)
    cases.add("gelu_erf", lambda x: F.gelu(x), {"x": wide})
    cases.add("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), {"x": wide})
    cases.add("silu", lambda x: F.silu(x), {"x": wide})

    cases.add("layer_norm", lambda x, weight, bias: F.layer_norm(x, (7,), weight, bias, 1e-5),
              {"x": normal(2, 3, 7) * 3 + 50, "weight": normal(7), "bias": normal(7)}, epsilon=1e-5)
    cases.add("rms_norm", lambda x, weight: rms_norm(x, weight, 1e-6),
              {"x": normal(2, 3, 7) * 3, "weight": normal(7)}, epsilon=1e-6)

    labels = torch.tensor([1, 4, -1, 0, 4, -1])
    for reduction in ("none", "sum", "mean"):
        cases.add("cross_entropy_" + reduction,
                  lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=-1, reduction=reduction),
                  {"logits": normal(6, 5) * 4}, {"labels": labels}, ignore_index=-1, reduction=reduction)
    cases.add("cross_entropy_smoothed",
              lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=-1, label_smoothing=0.2),
              {"logits": normal(6, 5) * 4}, {"labels": labels}, ignore_index=-1, label_smoothing=0.2,
              reduction="mean")

    def qkv(queries, keys):
        return {"q": normal(2, 4, queries, 6), "k": normal(2, 2, keys, 6), "v": normal(2, 2, keys, 3)}

    cases.add("attention", lambda q, k, v: attention(q, k, v, False), qkv(5, 5), causal=False)
    cases.add("attention_causal", lambda q, k, v: attention(q, k, v, True), qkv(3, 5), causal=True)
    cases.add("attention_causal_unseen", lambda q, k, v: attention(q, k, v, True), qkv(5, 3), causal=True)
    cases.add("attention_mask", lambda q, k, v, mask: attention(q, k, v, False, mask),
              {**qkv(4, 5), "mask": normal(2, 1, 4, 5)}, causal=False)

    angles = rotary_angles(5, 8, 10000.0, torch.float64)
    cases.add("rotary", lambda x: rotary(x), {"x": normal(2, 3, 5, 8)}, base=10000.0)
    cases.tensors["rotary.cosine"] = angles.cos()[:, :4].clone()
    cases.tensors["rotary.sine"] = angles.sin()[:, :4].clone()

    cases.add("topk_largest", lambda x: x.topk(3, dim=1).values, {"x": normal(4, 9)}, k=3, axis=1, largest=True)
    cases.add("topk_smallest", lambda x: x.topk(2, dim=0, largest=False).values, {"x": normal(6, 3)}, k=2, axis=0,
              largest=False)
    cases.add("logsumexp", lambda x: x.logsumexp(dim=1), {"x": normal(4, 6, 2) * 30}, axes=[1])
    cases.add("softmax", lambda x: x.softmax(dim=1), {"x": normal(3, 5, 2) * 5}, axis=1)
    cases.add("log_softmax", lambda x: x.log_softmax(dim=-1), {"x": normal(3, 5) * 30}, axis=-1)
    cases.add("var", lambda x: x.var(dim=1), {"x": normal(3, 8) + 1000}, axes=[1], correction=1)
    cases.add("var_population", lambda x: x.var(dim=(0, 2), unbiased=False), {"x": normal(3, 4, 5)}, axes=[0, 2],
              correction=0)
    cases.add("linear", lambda x, weight, bias: F.linear(x, weight, bias),
              {"x": normal(2, 3, 5), "weight": normal(4, 5), "bias": normal(4)})
    cases.add("matmul_broadcast", lambda a, b: a @ b, {"a": normal(2, 1, 3, 4), "b": normal(3, 4, 5)})
    save("ops.safetensors", cases.tensors, {**cases.options, "torch": torch.__version__})


def convolution_file():
    cases = Cases()

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    def convolution(name, function, x, weight, bias=True, **options):
        inputs = {"x": normal(*x), "weight": normal(*weight)}
        if bias:
            inputs["bias"] = normal(weight[0])
        cases.add(name, lambda **inputs: function(inputs["x"], inputs["weight"], inputs.get("bias"), **options), inputs,
                  **options)

    convolution("conv1d", F.conv1d, (2, 3, 7), (4, 3, 3))
    convolution("conv1d_options", F.conv1d, (2, 4, 9), (2, 2, 3), stride=2, padding=2, dilation=2, groups=2)
    convolution("conv2d", F.conv2d, (2, 3, 5, 4), (4, 3, 3, 2))
    convolution("conv2d_options", F.conv2d, (1, 4, 6, 7), (6, 2, 3, 2), bias=False, stride=(2, 1), padding=(1, 2),
                dilation=(1, 2), groups=2)
    convolution("conv2d_depthwise", F.conv2d, (2, 3, 4, 4), (6, 1, 3, 3), padding=1, groups=3)

    def pooling(name, function, x, kernel_size, **options):
        cases.add(name, lambda x: function(x, kernel_size, **options), {"x": normal(*x)}, kernel=kernel_size, **options)

    pooling("max_pool1d", F.max_pool1d, (2, 3, 8), 3, stride=2, padding=1)
    pooling("max_pool2d", F.max_pool2d, (2, 2, 6, 5), 2)
    pooling("max_pool2d_options", F.max_pool2d, (1, 2, 7, 8), (3, 2), stride=2, padding=1, dilation=(1, 2), ceil_mode=True)
    pooling("average_pool1d", F.avg_pool1d, (2, 3, 8), 3, stride=2, padding=1, ceil_mode=True)
    pooling("average_pool2d", F.avg_pool2d, (2, 2, 6, 5), 2)
    pooling("average_pool2d_options", F.avg_pool2d, (1, 2, 6, 8), (3, 4), stride=(2, 3), padding=1, ceil_mode=True)
    pooling("average_pool2d_without_padding", F.avg_pool2d, (1, 2, 6, 8), (3, 4), stride=(2, 3), padding=1, ceil_mode=True,
            count_include_pad=False)

    for training in (True, False):
        name = "batch_norm" if training else "batch_norm_evaluation"
        mean, variance = normal(3), normal(3).square() + 0.5
        fixed = {"running_mean": mean.clone(), "running_var": variance.clone()}
        cases.add(name, lambda x, weight, bias, **_: F.batch_norm(x, mean, variance, weight, bias, training, 0.1, 1e-5),
                  {"x": normal(4, 3, 2, 2) * 3 + 5, "weight": normal(3), "bias": normal(3)}, fixed, training=training)
        cases.tensors.update({f"{name}.updated_mean": mean, f"{name}.updated_var": variance})
    save("convolution.safetensors", cases.tensors, {**cases.options, "torch": torch.__version__})


def main():
    torch.set_num_threads(1)  # the same sums on every machine
    torch.manual_seed(20)
    model_file("gpt2.safetensors", gpt2, gpt2_weights(), GPT2)
    model_file("llama.safetensors", llama, llama_weights(), LLAMA)
    op_file()
    convolution_file()


if __name__ == "__main__":
    main()
