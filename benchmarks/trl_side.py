"""TRL's GRPOTrainer on this project's model, prompts and rewards: the referee of results in tests/test_trl.py and of time in bench.py.

Nothing is fetched: the model comes from `to_hf`, the tokenizer is built from the alphabet."""
import os, tempfile
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental there
import datasets
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from tiny_rlvr.vocab import BOS, EOS, PAD, TOKENS


def tokenizer() -> PreTrainedTokenizerFast:
    "The alphabet as a Hugging Face tokenizer: a character a token, <bos> before every text."
    t = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=TOKENS[PAD]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    t.post_processor = processors.TemplateProcessing(single=f"{TOKENS[BOS]} $A", special_tokens=[(TOKENS[BOS], BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token=TOKENS[PAD], bos_token=TOKENS[BOS], eos_token=TOKENS[EOS], padding_side="left")


def trainer(
    hf,  # GPT2LMHeadModel
    problems,  # list of Problem: the prompts, in the order in which they serve
    reward,  # f(completion, problem) -> float
    rollout_func=None,  # TRL's hook that replaces its sampling
    **settings,  # TRL's GRPOConfig
):
    "A GRPOTrainer that only trains: float32 on the CPU, no logging, no saving, no gradient checkpointing; everything else is TRL's default."
    quiet = dict(logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, output_dir=os.path.join(tempfile.gettempdir(), "tiny_rlvr_trl"))
    plain = dict(use_cpu=True, bf16=False, activation_checkpointing=False, dataloader_pin_memory=False, shuffle_dataset=False)
    def score(prompts, completions, problem, **_): return [reward(c, problems[i]) for c, i in zip(completions, problem)]
    t = GRPOTrainer(hf, score, GRPOConfig(**quiet | plain | settings), datasets.Dataset.from_dict(dict(prompt=[p.prompt for p in problems], problem=range(len(problems)))),
                    processing_class=tokenizer(), rollout_func=rollout_func)
    t.remove_callback(PrinterCallback)
    return t
