"""Tiny models from a configuration, nothing downloaded, trained by `transformers.Trainer`."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import tokenizers
import transformers

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.adapters import bayesianize_lora
from bayesify.adapters.transformers import BayesianTrainer, bayesianize_head

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def without_datasets(monkeypatch):
    """The folder of tests that is called `datasets` is not the package of that name."""
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def sentences(count, seed):
    """Six tokens; the label is whether the first is below ten. A column that the model does not take comes along."""
    tokens = torch.randint(1, 20, (count, 6), generator=torch.Generator().manual_seed(seed))
    return [
        {"input_ids": row, "attention_mask": torch.ones(6).long(), "length": 6, "labels": int(row[0] < 10)}
        for row in tokens
    ]


def arguments(folder, **options):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        per_device_eval_batch_size=50,
        num_train_epochs=options.pop("epochs", 12),
        learning_rate=options.pop("learning_rate", 1e-2),
        lr_scheduler_type="constant",
        save_strategy=options.pop("save_strategy", "no"),
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **options,
    )


def inputs(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}


def test_a_bayesian_head_learns_and_predicts(tmp_path):
    model = classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bnn = bayesianize_head(model, posteriors.MeanField(init_std=0.05))
    assert set(bnn.weights) == {"classifier.weight", "classifier.bias"}
    train, test = sentences(256, 0), sentences(100, 1)
    trainer = BayesianTrainer(bnn, arguments(tmp_path), train_dataset=train, eval_dataset=test, prediction_draws=5)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    end = trainer.evaluate()["eval_loss"]
    labels = torch.tensor([row["labels"] for row in test])
    prediction = trainer.bnn.predict(inputs(test), 5, generator=torch.Generator().manual_seed(0))
    assert end < 0.5 < start
    assert end == pytest.approx(-float(prediction.log_prob(labels).mean()), abs=1e-5)
    assert float((prediction.labels == labels).float().mean()) > 0.85
    logits, uncertainty = trainer.predict(test).predictions
    torch.testing.assert_close(torch.from_numpy(logits).softmax(-1), prediction.probs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.from_numpy(uncertainty), prediction.mutual_information, atol=1e-5, rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_loss_is_the_negative_bound_per_example(tmp_path):
    bnn = bayesianize_head(classifier())
    rows = sentences(32, 0)
    trainer = BayesianTrainer(bnn, arguments(tmp_path), train_dataset=rows, num_data=500, num_draws=2, kl_weight=0.5)
    batch = trainer.data_collator([{key: row[key] for key in row if key != "length"} for row in rows])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = trainer.compute_loss(trainer.model.train(), dict(batch))
        torch.manual_seed(3)
        wanted = -bnn.elbo(inputs(rows), batch["labels"], num_data=500, num_draws=2, kl_weight=0.5) / 500
    torch.testing.assert_close(found, wanted)


class LowRank(nn.Module):
    """A linear map that stays as it is, and an update of rank 2 beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_down = nn.Linear(base.in_features, 2, bias=False)
        self.lora_up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x):
        return self.base(x) + self.lora_up(self.lora_down(x))


def by_hand():
    model = classifier().requires_grad_(False)
    attention = model.bert.encoder.layer[0].attention.self
    attention.query, attention.value = LowRank(attention.query), LowRank(attention.value)
    model.classifier.requires_grad_(True)
    return model


def by_peft():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=2, target_modules=["query", "value"])
    return peft.get_peft_model(classifier(), config)


@pytest.mark.parametrize("make", [by_hand, by_peft])
def test_low_rank_weights_alone_are_bayesian(make, tmp_path):
    model = make()
    bnn = bayesianize_lora(model, posteriors.MeanField(init_std=0.02))
    assert len(bnn.weights) == 4
    assert all("lora_" in name for name in bnn.weights)
    frozen = {name: value.clone() for name, value in bnn.network.named_parameters() if not value.requires_grad}
    trainer = BayesianTrainer(
        bnn, arguments(tmp_path, epochs=25, learning_rate=3e-2), train_dataset=sentences(256, 0), prediction_draws=8
    )
    trainer.train()
    rows = sentences(100, 1)
    prediction = bnn.predict(inputs(rows), 8)
    labels = torch.tensor([row["labels"] for row in rows])
    assert float((prediction.labels == labels).float().mean()) > 0.8
    assert prediction.mutual_information.max() > 0
    assert frozen
    assert all(torch.equal(value, frozen[name]) for name, value in bnn.network.named_parameters() if name in frozen)


def test_a_checkpoint_is_gone_on_from(tmp_path):
    rows = sentences(64, 0)

    def run(epochs, resume=None):
        trainer = BayesianTrainer(
            bayesianize_head(classifier(), posteriors.MeanField(init_std=0.05)),
            arguments(tmp_path, epochs=epochs, save_strategy="epoch"),
            train_dataset=rows,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(2)
    again = run(2, str(tmp_path / "checkpoint-2"))
    for wanted, got in zip(whole.bnn.parameters(), again.bnn.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)


def test_mistakes_are_named(tmp_path):
    bnn = bayesianize_head(classifier())
    with pytest.raises(ValueError, match="give head= the name of the last layer"):
        bayesianize_head(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"weight_decay=0\.1; set it to 0"):
        BayesianTrainer(bnn, arguments(tmp_path, weight_decay=0.1), train_dataset=sentences(4, 0))
    with pytest.raises(ValueError, match="give num_data= this number"):
        BayesianTrainer(bnn, arguments(tmp_path))
    with pytest.raises(TypeError, match=r"BayesianTrainer: model=.*; give a BayesianNetwork"):
        BayesianTrainer(classifier(), arguments(tmp_path))
    with pytest.raises(ValueError, match="num_draws=0"):
        BayesianTrainer(bnn, arguments(tmp_path), num_data=4, num_draws=0)
    assert bayesify.bayesianize(classifier(), "point", likelihood=likelihoods.Categorical())


def test_the_benchmark_takes_a_model_and_a_table_of_yours(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    from benchmarks import lora as benchmark

    words = ["[PAD]", "[UNK]", *"abcdefgh"]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    options = {"tokenizer_object": core, "pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(tmp_path)
    classifier().save_pretrained(tmp_path)
    table = tmp_path / "table.csv"
    table.write_text(
        "text,label\n" + "\n".join(f"{a} {b} {a},{'yes' if a < b else 'no'}" for a in "abcdefgh" for b in "abcdefgh")
    )
    for name, setting in benchmark.SETTINGS.items():
        monkeypatch.setitem(benchmark.SETTINGS, name, replace(setting, epochs=2))
    asked = ["lora", "--model", str(tmp_path), "--data", str(table), "--file", str(tmp_path / "found.jsonl")]
    monkeypatch.setattr("sys.argv", [*asked, "--seeds", "1", "--count", "32", "--length", "4", "--device", "cpu"])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    benchmark.main()
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == list(benchmark.METHODS)
    assert all(0 <= row["ece"] <= 1 for row in rows)
    assert "| inducing |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_draws_of_whole_models_run_without_trying_vmap(name, monkeypatch):
    """A refusal of `vmap` costs a pass, and a warning."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=8)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "bert":
        model = classifier()
    else:
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=8, patch_size=4))
    x = torch.randn(2, 3, 8, 8) if name == "vit" else torch.randint(1, 20, (2, 6))
    monkeypatch.setattr(torch.func, "vmap", lambda *_, **__: pytest.fail("vmap was tried"))
    bnn = bayesify.bayesianize(model.eval(), posteriors.MeanField()).eval()
    with torch.no_grad():
        draws = bnn.draw(3)
        together = draws(x).logits
        assert torch.equal(together, torch.stack([draw(x).logits for draw in draws]))
