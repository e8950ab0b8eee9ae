"""Text from draws of a tiny language model, beside the probabilities of whole texts."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

import bayesify
from bayesify import Laplace, posteriors
from bayesify.adapters import bayesianize_lora, generate

pytestmark = pytest.mark.filterwarnings("ignore")
END, PROMPT = 3, 5


def language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
    )
    return transformers.LlamaForCausalLM(config).eval()


def adapted():
    """Adapters of peft under the posterior."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return bayesianize_lora(peft.get_peft_model(language_model(), config), posteriors.MeanField(init_std=0.3))


def by_hand():
    posterior = {"*q_proj*": posteriors.MeanField(init_std=0.3)}
    return bayesify.bayesianize(language_model(), posterior, likelihood="categorical")


def prompts(count=3):
    return torch.randint(4, 12, (count, PROMPT), generator=torch.Generator().manual_seed(0))


def labels_of(tokens):
    """Next tokens, without those of the prompt and what stands behind an end."""
    labels = tokens[:, 1:].clone()
    labels[:, : PROMPT - 1] = -100
    new = tokens[:, PROMPT:] == END
    labels[:, PROMPT - 1 :][new.long().cumsum(-1) > new.long()] = -100
    return labels


@pytest.mark.parametrize("make", [by_hand, adapted])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_probability_of_a_text_is_that_of_the_mixture_of_draws(make, temperature):
    bnn = make()
    options = {"max_new_tokens": 8, "temperature": temperature}
    text = generate(bnn, prompts(), 6, generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(text.tokens[:, :PROMPT], prompts())
    draws = bnn.draw(6, generator=torch.Generator().manual_seed(1))
    prediction = bnn.predict({"input_ids": text.tokens[:, :-1]}, draws=draws)
    torch.testing.assert_close(
        text.log_probs.sum(-1), prediction.log_prob(labels_of(text.tokens)), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(  # all draws weigh the same before the first new token
        text.mutual_information[:, 0], prediction.mutual_information[:, PROMPT - 1], rtol=1e-3, atol=1e-5
    )


def test_each_draw_writes_what_it_writes_alone():
    bnn = by_hand()
    text = generate(bnn, prompts(), 4, mix=False, generator=torch.Generator().manual_seed(1), max_new_tokens=6)
    draws = bnn.draw(4, generator=torch.Generator().manual_seed(1))
    for index, draw in enumerate(draws):
        alone = language_model()
        with torch.no_grad():
            for name, value in draw.weights.items():
                alone.get_parameter(name).copy_(value)
        wanted = alone.generate(prompts(), max_new_tokens=6, do_sample=False)
        assert torch.equal(text.tokens[index, :, : wanted.shape[1]], wanted)
    assert len({tuple(part.flatten().tolist()) for part in text.tokens}) > 1
    assert not text.mutual_information.any()


def test_prompts_of_different_length_are_filled_up_on_the_left():
    bnn, ids = by_hand(), prompts()
    filled = torch.cat([torch.zeros(3, 2, dtype=torch.long), ids], dim=1)
    plain, padded = (
        generate(bnn, given, 4, generator=torch.Generator().manual_seed(1), max_new_tokens=4)
        for given in (ids, {"input_ids": filled, "attention_mask": (filled > 0).long()})
    )
    assert torch.equal(plain.tokens, padded.tokens[:, 2:])
    torch.testing.assert_close(plain.log_probs, padded.log_probs, rtol=1e-4, atol=1e-4)


def test_drawn_tokens_are_as_frequent_as_the_mixture_says():
    bnn, count = by_hand(), 4_000
    ids = prompts(1).expand(count, -1)
    generator = torch.Generator().manual_seed(1)
    tokens = generate(bnn, ids, 3, temperature=1.0, generator=generator, max_new_tokens=1).tokens[:, -1]
    draws = bnn.draw(3, generator=torch.Generator().manual_seed(1))
    probs = bnn.predict({"input_ids": ids[:1]}, draws=draws).probs[0, -1]
    found = torch.bincount(tokens, minlength=12) / count
    assert ((found - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt() + 1e-9).all()


def test_laplace_writes_too():
    ids = prompts(8)
    names = ["model.layers.0.self_attn.q_proj.weight"]
    laplace = Laplace(language_model(), "categorical", names, "kronecker", num_samples=4)
    laplace.fit([({"input_ids": ids[:, :-1]}, ids[:, 1:])])
    assert generate(laplace, ids[:2], 3, max_new_tokens=2).tokens.shape == (2, PROMPT + 2)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="give temperature= to sample tokens"):
        generate(by_hand(), prompts(), num_beams=2)
    with pytest.raises(ValueError, match="has no method generate"):
        generate(bayesify.bayesianize(nn.Linear(2, 2), "mean_field"), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"input_ids are \[5\].*tokens.unsqueeze\(0\)"):
        generate(by_hand(), prompts()[0])
    with pytest.raises(ValueError, match="there are no input_ids"):
        generate(by_hand(), {"tokens": prompts()})
    with pytest.raises(TypeError, match="give a Drawable, such as a BayesianNetwork"):
        generate(language_model(), prompts())


def test_a_classifier_under_adapters_writes_no_text():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    model = transformers.LlamaForSequenceClassification(language_model().config)
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification has no method generate.*GPT2LMHeadModel"):
        generate(bayesianize_lora(peft.get_peft_model(model, config)), prompts())
