"""The slow, obvious versions that the tests compare the library with.

They work on Hugging Face's GPT-2 and on plain loops: nothing here is shared with the code under test but the alphabet."""
import numpy as np, torch
from tiny_rlvr.vocab import TOKENS

PAD, BOS, EOS = 0, 1, 2


def ids_of(text): return [TOKENS.index(c) for c in text]


def text_of(ids): return "".join(TOKENS[i] for i in ids)


def hf_logp(hf, rows, temperature=1.):
    "Log-probabilities [rows, longest, 20] after each token of each row, from one padded forward pass of whole sequences."
    longest = max(map(len, rows))
    ids = torch.tensor([r + [PAD] * (longest - len(r)) for r in rows])
    seen = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    return (hf(input_ids=ids, attention_mask=seen).logits.double() / temperature).log_softmax(-1)


def hf_answer_logprob(hf, prompts, answers):
    "log P(answer + <eos> | prompt), a token at a time."
    out = []
    for prompt, answer in zip(prompts, answers):
        row, total = [BOS] + ids_of(prompt), 0.
        for token in ids_of(answer) + [EOS]:
            total += hf_logp(hf, [row])[0, -1, token].item()
            row = row + [token]
        out.append(total)
    return np.array(out)


def hf_forced_logprob(hf, prompts, answers):
    "The same from one padded pass, no prefix shared."
    rows = [[BOS] + ids_of(p + a) + [EOS] for p, a in zip(prompts, answers)]
    with torch.no_grad(): logp = hf_logp(hf, rows)
    return np.array([sum(lp[t-1, row[t]].item() for t in range(1 + len(p), len(row))) for p, row, lp in zip(prompts, rows, logp)])


def naive_rollout(hf, prompts, group_size, uniforms, temperature=1.):
    "Lists of tokens, log-probabilities and entropies for each completion; the whole sequence is computed again for each token."
    T = uniforms.shape[1]
    prefixes = [[BOS] + ids_of(p) for p in prompts for _ in range(group_size)]
    tokens, logprobs, entropies = ([[] for _ in prefixes] for _ in range(3))
    for t in range(T):
        live = [i for i, row in enumerate(tokens) if EOS not in row]
        if not live: break
        rows = [prefixes[i] + tokens[i] for i in live]
        with torch.no_grad(): logp = hf_logp(hf, rows, temperature)
        for i, row, lp in zip(live, rows, logp):
            lp = lp[len(row) - 1].numpy()
            p = np.exp(lp)
            token = next(v for v in range(20) if p[:v+1].sum() > uniforms[i, t] or v == 19)
            tokens[i].append(token)
            logprobs[i].append(lp[token])
            entropies[i].append(-sum(q * l for q, l in zip(p, lp)))
    return tokens, logprobs, entropies


def in_our_names(hf, get=lambda p: p.detach()):
    "Hugging Face's parameters (or `get` of them, such as their gradients) as a state dict of ours; its linear layers are stored transposed."
    parts = {"ln_1": "ln1", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj", "ln_2": "ln2", "mlp.c_fc": "fc", "mlp.c_proj": "out"}
    top = {"transformer.wte.weight": "tok.weight", "transformer.wpe.weight": "pos.weight", "transformer.ln_f.weight": "ln.weight",
           "transformer.ln_f.bias": "ln.bias", "lm_head.weight": "head.weight"}
    out = {}
    for name, p in hf.named_parameters():
        if name in top: out[top[name]] = get(p); continue
        _, _, i, *part, kind = name.split(".")
        part = ".".join(part)
        out[f"blocks.{i}.{parts[part]}.{kind}"] = get(p).t() if kind == "weight" and "c_" in part else get(p)
    return out


def mean(xs): return sum(xs) / len(xs)


def numpy_advantages(rewards, scale="std", ddof=1, eps=1e-4):
    "[groups][group_size] lists"
    out = []
    for group in rewards:
        if all(r == group[0] for r in group): out.append([0.] * len(group)); continue
        m = mean(group)
        sd = (sum((r - m)**2 for r in group) / (len(group) - ddof))**.5
        out.append([(r - m) / (sd + eps if scale == "std" else 1) for r in group])
    return out


def numpy_grpo_loss(logp, old, advantages, lengths, normaliser, ref=None, kl_weight=0., clip_low=.2, clip_high=.2):
    """Minus the clipped objective, from the formulas of the papers; [n][T] and [n] arrays.

    'sequence': DeepSeekMath eq. 3, 1/G sum_i 1/|o_i| sum_t; 'token': DAPO eq. 8, 1/sum_i|o_i| sum_i sum_t; 'constant': Dr. GRPO, 1/(G T) sum_i sum_t."""
    n, T = np.shape(logp)
    total = 0.
    for i in range(n):
        share = {"sequence": 1 / (n * lengths[i]), "token": 1 / sum(lengths), "constant": 1 / (n * T)}[normaliser]
        for t in range(lengths[i]):
            ratio = np.exp(logp[i][t] - old[i][t])
            clipped = 1 - clip_low if ratio < 1 - clip_low else 1 + clip_high if ratio > 1 + clip_high else ratio
            gain = min(ratio * advantages[i], clipped * advantages[i])
            if kl_weight:
                q = np.exp(ref[i][t] - logp[i][t])
                gain -= kl_weight * (q - np.log(q) - 1)
            total -= share * gain
    return total
