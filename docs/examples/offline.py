"""Answers a file of questions, or three of its own, and writes one JSON object per line.

python docs/examples/offline.py                                     starts a cluster for the time of the run
python docs/examples/offline.py --base-url http://127.0.0.1:8000    uses one that runs
"""

import argparse
import json
import sys
from pathlib import Path

from pdserve import LLM, SamplingParams, StructuredOutputsParams

QUESTIONS = ["What is the capital of France?", "Name three primary colors.", "How many legs has a spider?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="a cluster that runs; default: start one")
    parser.add_argument("--model", help="default: that of the cluster, or a small one")
    parser.add_argument("--questions", type=Path, help="a file with one question per line")
    arguments = parser.parse_args()
    questions = arguments.questions.read_text().splitlines() if arguments.questions else QUESTIONS
    model = arguments.model or (None if arguments.base_url else "smollm2-135m-instruct")

    with LLM(model, base_url=arguments.base_url) as llm:
        # Answers: greedy, so always the same.
        chats = [[{"role": "user", "content": question}] for question in questions]
        answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48))

        # Three different tries of each, with the log-probability of the whole text. The same ones in each run,
        # because the seed of an LLM is 0 unless it is given another one.
        tries = llm.generate(
            [f"Question: {question}\nAnswer:" for question in questions],
            SamplingParams(n=3, temperature=0.8, max_tokens=16, stop=["\n"], logprobs=0),
        )

        # Judgements that are always one of two words.
        yes_or_no = StructuredOutputsParams(choice=["yes", "no"])
        judged = llm.chat(
            [[{"role": "user", "content": f"Is this about geography? {question}"}] for question in questions],
            SamplingParams(temperature=0, structured_outputs=yes_or_no),
            use_tqdm=False,
        )

    for question, answer, several, judgement in zip(questions, answers, tries, judged, strict=True):
        best = max(several.outputs, key=lambda output: output.cumulative_logprob or 0.0)
        row = {
            "question": question,
            "answer": answer.outputs[0].text,
            "best_of_three": best.text.strip(),
            "geography": judgement.outputs[0].text,
            "seed": several.seed,
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
