"""A reward model rates the answers of online KTO: thumbs up above a threshold, or above the median of an iteration.

    python examples/reward_model.py --reward.model FOLDER --data.extra dialogue

FOLDER, or an id of the Hub, is a model for sequence classification with one score and a chat template of its own. It
gets the messages of the record and the answer's text, not the policy's tokens; it runs in the first process, beside the
policy. Scores are in `rewards` of iterations/rated-N.jsonl. The accuracy before and after is the mean of
sigmoid(score - threshold): how likely an answer is better than one at the threshold, by Bradley and Terry. For the
median it is of the score alone.
"""

import json
import statistics
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import online
from evaluate import Answer, as_answers, with_answers
from infra.console import advance, progress, run_cli, user_error
from infra.settings import refuse_unless, split_commas
from records.forms import as_turns, understand_record
from trainer import Trainer


@dataclass(frozen=True)
class RewardSettings:
    model: str
    """The reward model: a folder with safetensors, or an id of the Hub."""
    threshold: float | Literal["median"] = 0.0
    """An answer above it is right. median: above the iteration's median."""


@dataclass(frozen=True, kw_only=True)
class Settings(online.Settings):
    reward: RewardSettings

    def validate(self) -> None:
        super().validate()
        has_dialogue = "dialogue" in split_commas(self.data.extra)
        refuse_unless(has_dialogue, "data.extra: add dialogue, the messages for the reward model")
        refuse_unless(self.online.cut == "judge", "online.cut: the reward model judges all answers")


def with_dialogue(record: dict) -> list[dict]:
    """The record with its prompt's messages in one more field, as text."""
    turns = as_turns(understand_record(record, "prompts").prompt)
    return [{**record, "dialogue": json.dumps(turns)}]


class RewardModel:
    """The checker, and what rate asks. `load` says which model."""

    def load(self, args: RewardSettings, device: torch.device) -> None:
        """Raises BadInput."""
        self.threshold = 0.0 if args.threshold == "median" else args.threshold
        options = dict(trust_remote_code=False, use_safetensors=True, output_loading_info=True)
        with user_error("reward.model", args.model):
            self.tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
            model, info = AutoModelForSequenceClassification.from_pretrained(args.model, **options)
        missing = ", ".join(sorted(info["missing_keys"]))
        refuse_unless(not missing, f"reward.model: {args.model}: no weights of {missing}")
        refuse_unless(model.num_labels == 1, f"reward.model: {model.num_labels} scores, not one")
        refuse_unless(self.tokenizer.chat_template, "reward.model: it has no chat template")
        self.model = model.to(device).eval()

    @torch.no_grad()
    def scores(self, answers: list[Answer]) -> list[float]:
        scores = []
        with progress("scoring", len(answers)):
            for answer in answers:
                turns = json.loads(answer.fields["dialogue"])
                turns.append({"role": "assistant", "content": answer.completion})
                text = self.tokenizer.apply_chat_template(turns, tokenize=False)
                # one at a time: the rounding of a score does not depend on the others
                ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
                scores.append(self.model(ids.to(self.model.device)).logits.item())
                advance()
        return scores

    def __call__(self, answers: list[Answer]) -> list[float]:
        scores = torch.tensor(self.scores(answers), dtype=torch.float64)
        return torch.sigmoid(scores - self.threshold).tolist()


reward_model = RewardModel()


class Rewarded(Trainer):
    def __init__(self, run):
        super().__init__(run)
        if run.fabric.global_rank == 0:
            reward_model.load(run.cfg.reward, run.fabric.device)


def rate(run, prompts, answers):
    answered = with_answers(prompts, answers)
    scores = reward_model.scores(as_answers(run.tokenizer, answered, run.cfg.online.stop))
    threshold = run.cfg.reward.threshold
    if threshold == "median":
        threshold = statistics.median(scores)
    return [
        e._replace(label=score > threshold, rewards=(score, None))
        for e, score in zip(answered, scores)
    ]


if __name__ == "__main__":
    given = dict(trainer=Rewarded, rate=rate, checker=reward_model, records=with_dialogue)
    run_cli(lambda: online.main(settings=Settings, **given))
