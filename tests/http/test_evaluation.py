"""lm-eval gives the same scores with the fleet as with transformers."""

import json

import pytest

TASK = """
task: digits
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""


@pytest.fixture
def tasks(tmp_path):
    from lm_eval.tasks import TaskManager  # takes long, and every worker of pytest imports this module

    words = ("sum", "difference", "product", "greatest", "least", "first")
    rows = [
        {"question": f"{word} of {i} and {7 * i % 5}", "choices": [str(i), "none", f"{i + 1} or so"], "label": i % 3}
        for i, word in enumerate(words * 2)
    ]
    data = tmp_path / "digits.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "digits.yaml").write_text(TASK.format(data=data))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_scores_match_transformers(served, tasks, monkeypatch, tmp_path):
    import lm_eval

    monkeypatch.setenv("OPENAI_API_KEY", served.token)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    ours = {
        "base_url": f"{served.url}/v1/completions",
        "model": "tiny",
        "tokenizer": str(served.model),
        "tokenizer_backend": "huggingface",
        "max_length": 128,
        "num_concurrent": 1,
        "batch_size": 4,
    }
    theirs = {"pretrained": str(served.model), "device": "cpu", "dtype": "float32", "batch_size": 4}
    found, wanted = (
        lm_eval.simple_evaluate(
            model=model, model_args=arguments, tasks=["digits"], task_manager=tasks, bootstrap_iters=0, log_samples=True
        )
        for model, arguments in (("local-completions", ours), ("hf", theirs))
    )
    assert found["results"]["digits"]["acc,none"] == wanted["results"]["digits"]["acc,none"]
    for one, other in zip(found["samples"]["digits"], wanted["samples"]["digits"], strict=True):
        assert one["doc_id"] == other["doc_id"]
        for (logprob, greedy), (expected, is_greedy) in zip(
            one["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(logprob) == pytest.approx(float(expected), abs=1e-3)
            assert greedy == is_greedy
