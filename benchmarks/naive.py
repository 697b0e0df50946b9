"""The first version that one would write of each job, with the same model: what the library's versions are compared with.

Sequences are padded to the longest of the batch; sampling runs every whole sequence through the model again for each token; all completions of all groups
go through the backward pass; AdamW is PyTorch's default."""
import numpy as np
import torch
import torch.nn.functional as F

from tiny_rlvr.grpo import group_advantages, grpo_loss
from tiny_rlvr.model import GPT
from tiny_rlvr.pretrain import tokens_of
from tiny_rlvr.rewards import score
from tiny_rlvr.tasks import verify
from tiny_rlvr.vocab import BOS, EOS, PAD, decode, encode


def optimizer_for(model: GPT, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.)


def step(model: GPT, opt, loss):
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
    opt.step()


def pretrain_step(model: GPT, opt, problems):
    "One update on a padded batch."
    rows = [tokens_of(p) for p in problems]
    longest = max(map(len, rows))
    ids = torch.tensor([r + [PAD]*(longest-len(r)) for r in rows])
    real = torch.tensor([[True]*len(r) + [False]*(longest-len(r)) for r in rows])
    step(model, opt, F.cross_entropy(model(ids[:, :-1])[real[:, 1:]], ids[:, 1:][real[:, 1:]]))


@torch.no_grad()
def generate(model: GPT, prompts, group_size=1, sample=True, max_new_tokens=8) -> tuple[torch.Tensor, int]:
    "Sequences [n, tokens], PAD after <eos>, and the prompt's length (prompts must agree in it)."
    ids = torch.tensor([[BOS, *encode(p)] for p in prompts]).repeat_interleave(group_size, 0)
    n_prompt, done = ids.shape[1], torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = model(ids)[:, -1]
        token = torch.multinomial(logits.softmax(-1), 1)[:, 0] if sample else logits.argmax(-1)
        ids = torch.cat([ids, token.masked_fill(done, PAD)[:, None]], 1)
        done |= token == EOS
        if done.all(): break
    return ids, n_prompt


def completions(ids: torch.Tensor, n_prompt: int) -> tuple[list[str], torch.Tensor]:
    "Texts without <eos>, and the mask of generated positions [n, T]."
    new = ids[:, n_prompt:]
    mask = (new == EOS).cumsum(1) - (new == EOS).int() == 0
    return [decode([t for t, m in zip(row, keep) if m and t != EOS]) for row, keep in zip(new.tolist(), mask.tolist())], mask


def grpo_update(model: GPT, opt, problems, reward, group_size=8):
    "One on-policy update."
    ids, n_prompt = generate(model, [p.prompt for p in problems], group_size)
    texts, mask = completions(ids, n_prompt)
    rewards = score(texts, np.repeat(problems, group_size), reward).reshape(len(problems), group_size)
    logprobs = model(ids[:, :-1])[:, n_prompt-1:].log_softmax(-1).gather(2, ids[:, n_prompt:, None])[..., 0]
    loss, _ = grpo_loss(logprobs, logprobs.detach(), torch.from_numpy(group_advantages(rewards).flatten()).float(), mask/mask.sum())
    step(model, opt, loss)


@torch.no_grad()
def exact_p(model: GPT, problems) -> np.ndarray:
    "p of each answer, a problem at a time."
    out = []
    for p in problems:
        row = tokens_of(p)
        logp = model(torch.tensor([row[:-1]]))[0].log_softmax(-1)
        out.append(sum(logp[i-1, row[i]].item() for i in range(len(p.prompt)+1, len(row))))
    return np.exp(out)


def terrain_cell(model: GPT, problems) -> dict:
    "A cell's four measurements."
    prompts, p = [x.prompt for x in problems], exact_p(model, problems)
    greedy, _ = completions(*generate(model, prompts, sample=False))
    ids, n_prompt = generate(model, prompts)
    mask = completions(ids, n_prompt)[1]
    with torch.no_grad(): logp = model(ids[:, :-1])[:, n_prompt-1:].log_softmax(-1)
    entropy = (-(logp.exp()*logp).sum(-1)*mask).sum(1)/mask.sum(1)
    return dict(greedy=np.mean([verify(c, x.answer) for c, x in zip(greedy, problems)]), p_correct=p.mean(), pass64=(1-(1-p)**64).mean(), entropy=entropy.mean().item())
