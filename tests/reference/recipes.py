"""The first loss of each recipe from its paper's equations, by loops in float64.

A batch is a list of rows, dicts with ``group``, ``reward``, ``parts``, ``hidden`` of a rollout, its columns with one
number by their names, such as ``question_mean``, and lists over its completion's tokens: ``policy`` (the current
weights'), ``behaviour``, ``ref`` log-probs, ``generation`` (those of the policy that drew them, as the learner has
them), those of the weights before the iteration's updates (``start``), before the iteration before (``previous``) and
of their moving average (``average``), ``entropy`` of what each was drawn from, ``value`` of a critic; ``prompt`` has
the current weights' log-probs of the prompt's tokens but the first, ``answers`` of what an environment wrote between
the policy's turns. Rows without a reward are not in it. ``longest`` is the most tokens that a completion may have,
``iteration`` how many came before.

At the first loss of a run the weights are those that it started with: these policies are all the current one.
"""

import math

import numpy as np
from reference import turns as _turns


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def std(values):
    centre = mean(values)
    return math.sqrt(mean((v - centre) ** 2 for v in values))


def groups(batch):
    named = {}
    for row in batch:
        named.setdefault(row["group"], []).append(row)
    return list(named.values())


def siblings(batch, row):
    return [other for other in batch if other["group"] == row["group"]]


def rewards(rows, name="reward"):
    return [row[name] for row in rows]


def is_tied(rows):
    return len({row["reward"] for row in rows}) == 1


def ratio(row, t, old="behaviour"):
    return math.exp(row["policy"][t] - row[old][t])


def ppo(r, a, low=0.2, high=0.2):
    """Return -min(r A, clip(r, 1 - low, 1 + high) A)."""
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def k2(row, t, other="ref"):
    return (row["policy"][t] - row[other][t]) ** 2 / 2


def k3(row, t, other="ref"):
    d = row["policy"][t] - row[other][t]
    return math.exp(-d) - 1 + d


# ---- advantages


def grpo_advantage(batch, row, reward=None):
    value = reward or (lambda r: r["reward"])
    values = [value(r) for r in siblings(batch, row)]
    if len(set(values)) == 1:
        return 0.0
    return (value(row) - mean(values)) / (std(values) + 1e-6)


def centred(batch, row):
    return row["reward"] - mean(rewards(siblings(batch, row)))


def leave_one_out(batch, row):
    others = [r["reward"] for r in siblings(batch, row) if r is not row]
    return row["reward"] - mean(others)


# ---- sums over the batch


def token_mean(batch, term):
    terms = [term(row, t) for row in batch for t in range(len(row["policy"]))]
    return mean(terms)


def sequence_mean(batch, term):
    return mean(mean(term(row, t) for t in range(len(row["policy"]))) for row in batch)


def by_longest(batch, term, longest):
    return mean(math.fsum(term(row, t) for t in range(len(row["policy"]))) / longest for row in batch)


def prompt_mean(batch, term):
    return mean(token_mean(rows, term) for rows in groups(batch))


def without_tied(batch):
    return [row for rows in groups(batch) if not is_tied(rows) for row in rows]


# ---- the recipes


def grpo(batch, longest):
    """Shao et al. 2024, eq. 3 and 4: 1/G sum_i 1/|o_i| sum_t (min(..) - beta D_KL), beta = 0.04."""
    a = {id(row): grpo_advantage(batch, row) for row in batch}
    return sequence_mean(batch, lambda row, t: ppo(ratio(row, t), a[id(row)]) + 0.04 * k3(row, t))


def dr_grpo(batch, longest):
    """Liu et al. 2025: no division by the standard deviation or by a row's own length."""
    return by_longest(batch, lambda row, t: ppo(ratio(row, t), centred(batch, row)), longest)


def dapo(batch, longest):
    """Yu et al. 2025: a soft penalty for the last 4 tokens; only groups with 0 < correct < G; a mean over tokens."""

    def shaped(row):
        over = len(row["policy"]) - (longest - 4)
        return row["reward"] - min(max(over / 4, 0), 1)

    kept = without_tied(batch)
    return token_mean(kept, lambda row, t: ppo(ratio(row, t), grpo_advantage(batch, row, shaped), 0.2, 0.28))


def sapo(batch, longest):
    """arXiv:2509.08721: DAPO's clip, without groups that have no advantage."""
    kept = without_tied(batch)
    return token_mean(kept, lambda row, t: ppo(ratio(row, t), grpo_advantage(batch, row), 0.2, 0.28))


def april(batch, longest):
    """Zhou et al. 2025 (released scripts): GRPO with DAPO's clip, a mean over each sequence, no KL penalty."""
    return sequence_mean(batch, lambda row, t: ppo(ratio(row, t), grpo_advantage(batch, row), 0.2, 0.28))


def echo(batch, longest):
    """arXiv:2605.24517: GRPO's loss plus 0.05 times the cross-entropy of the environment's tokens, means over rows."""
    # Of a prompt of one token nothing is predicted: it adds 0.
    of_prompts = mean(-mean(row["prompt"]) if row["prompt"] else 0.0 for row in batch)
    return sequence_mean(batch, lambda row, t: ppo(ratio(row, t), grpo_advantage(batch, row))) + 0.05 * of_prompts


def echo_answers(batch, longest):
    """arXiv:2605.24517: the same with the environment's answers between turns."""
    of_answers = mean(-mean(row["answers"]) if row["answers"] else 0.0 for row in batch)
    return sequence_mean(batch, lambda row, t: ppo(ratio(row, t), grpo_advantage(batch, row))) + 0.05 * of_answers


def gdpo(batch, longest, weights=(1.0, 0.5)):
    """arXiv:2601.05242:

    each reward is normalised in its group, weighted, summed, and divided by the batch's deviation.
    """
    total = {}
    for row in batch:
        parts = [grpo_advantage(batch, row, lambda r, k=k: r["parts"][k]) for k in range(len(weights))]
        total[id(row)] = math.fsum(w * a for w, a in zip(weights, parts, strict=True))
    scale = std(list(total.values())) + 1e-6
    return token_mean(batch, lambda row, t: ppo(ratio(row, t), total[id(row)] / scale))


def ttrl(batch, longest):
    """Zuo et al.

    2025 (released scripts): GRPO with a KL weight of 0.001 and a mean over tokens. The votes are tested elsewhere.
    """
    a = {id(row): grpo_advantage(batch, row) for row in batch}
    return token_mean(batch, lambda row, t: ppo(ratio(row, t), a[id(row)]) + 0.001 * k3(row, t))


def step_grpo(batch, longest):
    """Zhang et al. 2025: GRPO's loss with rewards by key steps."""
    return grpo(batch, longest)


def gspo(batch, longest):
    """Zheng et al. 2025: s_i = (pi / pi_old)^(1/|y_i|), a mean over sequences; pi_old by the learner."""

    def term(row, t):
        s = math.exp(mean(p - b for p, b in zip(row["policy"], row["generation"], strict=True)))
        return ppo(s, grpo_advantage(batch, row), 3e-4, 4e-4)

    return sequence_mean(batch, term)


def replay_positive_bias(batch, longest):
    """Arnal et al. 2026: the ratio of the whole sequence, clipped to [0.8, 1.2]."""

    def term(row, t):
        u = math.exp(math.fsum(row["policy"]) - math.fsum(row["behaviour"]))
        return ppo(u, grpo_advantage(batch, row))

    return sequence_mean(batch, term)


def cispo(batch, longest):
    """Khatri et al. 2025: -sg(min(rho, 5)) A log pi, a mean over prompts, A over the batch's std, no tied groups."""
    scale = std([centred(batch, row) for row in batch]) + 1e-6
    kept = without_tied(batch)
    return prompt_mean(kept, lambda row, t: -min(ratio(row, t), 5.0) * centred(batch, row) / scale * row["policy"][t])


def rloo(batch, longest):
    """Ahmadian et al. 2024: -(r - mean of the others) log pi(y), of whole sequences."""
    return by_longest(batch, lambda row, t: -leave_one_out(batch, row) * row["policy"][t], longest)


def asymre(batch, longest):
    """Arnal et al. 2025: -(r - (V - 0.1)) log pi(y), of whole sequences; no ratio."""
    return by_longest(batch, lambda row, t: -(centred(batch, row) + 0.1) * row["policy"][t], longest)


def vcpo(batch, longest):
    """arXiv:2602.17616: -W (r - b) log pi(y), W = min(pi / mu, 8), b = sum W^2 |g|^2 r / sum W^2 |g|^2.

    Here g = grad log pi(y). As in the recipe, the squared norm of g is replaced by the sum over tokens of (1 - p)^2.
    """

    def weight(row):
        return min(math.exp(math.fsum(row["policy"]) - math.fsum(row["behaviour"])), 8.0)

    def share(row):
        return weight(row) ** 2 * math.fsum((1 - math.exp(p)) ** 2 for p in row["policy"])

    def term(row, t):
        rows = siblings(batch, row)
        b = math.fsum(share(r) * r["reward"] for r in rows) / math.fsum(map(share, rows))
        return -weight(row) * (0.0 if is_tied(rows) else row["reward"] - b) * row["policy"][t]

    return by_longest(batch, term, longest)


def reinforce_pp(batch, longest):
    """Hu 2025: (r - mean) / std of the whole batch; the KL penalty to the starting model is a term of the loss."""
    centre, scale = mean(rewards(batch)), std(rewards(batch)) + 1e-6
    return token_mean(batch, lambda row, t: ppo(ratio(row, t), (row["reward"] - centre) / scale) + 0.01 * k2(row, t))


def ppo_ewma(batch, longest):
    """Hilton et al. 2021: max(-A e^(lp - lp_adj), -A e^(clip(lp - lp_prox, log .8, log 1.2) + lp_prox - lp_adj)).

    lp_adj = max(lp_behaviour, sg(lp) - log 100). There was no batch before.
    """
    centre, scale = mean(rewards(batch)), std(rewards(batch)) + 1e-6

    def term(row, t):
        a, lp, prox = (row["reward"] - centre) / scale, row["policy"][t], row["average"][t]
        adjusted = max(row["behaviour"][t], lp - math.log(100))
        near = min(max(lp - prox, math.log(0.8)), math.log(1.2))
        return max(-a * math.exp(lp - adjusted), -a * math.exp(near + prox - adjusted))

    return token_mean(batch, term)


def decoupled_ppo(batch, longest):
    """Fu et al. 2025: w max(-A u, -A clip(u)), u = pi / pi_prox, w = pi_prox / pi_behaviour; 0 where that is over 5."""

    def term(row, t):
        w = math.exp(row["start"][t] - row["behaviour"][t])
        return w * ppo(ratio(row, t, "start"), grpo_advantage(batch, row)) if w <= 5 else 0.0

    return token_mean(batch, term)


def loop(batch, longest):
    """Chen et al. 2025, eq. 5: E_x 1/|x| sum_t min(rho A, A + eps |A|), leave-one-out, eps = 0.1."""
    kept = without_tied(batch)
    return sequence_mean(kept, lambda row, t: ppo(ratio(row, t), leave_one_out(batch, row), 0.1, 0.1))


def rr(batch, longest):
    """Sun et al. 2025 (released code): mixed groups; r = pi / mu within [r_old (1 - .2), r_old (1 + .2)].

    r_old = pi_old / mu, pi_old the weights before the iteration's updates.
    """
    kept = without_tied(batch)

    def term(row, t):
        a, r = grpo_advantage(batch, row), ratio(row, t)
        r_old = math.exp(row["start"][t] - row["behaviour"][t])
        return -min(r * a, min(max(r, 0.8 * r_old), 1.2 * r_old) * a)

    return token_mean(kept, term)


def mc_grpo(batch, longest):
    """arXiv:2601.22582: rewards compared with the group's median in GRPO's loss, a mean over sequences; KL 0.04."""

    def term(row, t):
        rows = siblings(batch, row)
        advantage = 0.0 if is_tied(rows) else row["reward"] - float(np.median(rewards(rows)))
        return ppo(ratio(row, t), advantage) + 0.04 * k3(row, t)

    return sequence_mean(batch, term)


def mssr(batch, longest):
    """arXiv:2512.18215: A = (r - v) whitened, + min(.4 H, |A| / 2) at each token (arXiv:2506.14758); KL .01."""
    gains = [row["reward"] - row["question_mean"] for row in batch]
    centre, scale = mean(gains), std(gains) + 1e-6

    def term(row, t):
        a = (row["reward"] - row["question_mean"] - centre) / scale
        return ppo(ratio(row, t), a + min(0.4 * row["entropy"][t], abs(a) / 2)) + 0.01 * k3(row, t)

    return token_mean(batch, term)


def poise(batch, longest, regression):
    """arXiv:2605.07579: A_i = r_i - mean of the other rows' g; g is a ridge regression on a rollout's features."""
    sums = np.asarray(regression, np.float64)
    coefficients = np.linalg.solve(sums[:, :-1] + np.eye(len(sums)), sums[:, -1])

    def g(row):
        surprise, entropy = [-x for x in row["behaviour"]], row["entropy"]
        state = [x / math.sqrt(len(row["hidden"])) for x in row["hidden"]]
        tells = [1, len(surprise) / longest, mean(surprise), std(surprise), mean(entropy), std(entropy), *state]
        return float(np.dot(tells, coefficients))

    def term(row, t):
        others = [r for r in siblings(batch, row) if r is not row]
        return ppo(ratio(row, t), row["reward"] - mean(map(g, others)) if others else 0.0)

    return token_mean(batch, term)


def ppo_critic(batch, longest, taught=lambda row, t: 1):
    """Hu et al. 2025: A_t = r - V_t, whitened over the batch's tokens, and the critic's squared error."""
    gains = {(id(row), t): row["reward"] - v for row in batch for t, v in enumerate(row["value"])}
    centre, scale = mean(gains.values()), std(list(gains.values())) + 1e-6

    def term(row, t):
        surrogate = ppo(ratio(row, t), (gains[id(row), t] - centre) / scale)
        return taught(row, t) * surrogate + gains[id(row), t] ** 2 / 2

    return token_mean(batch, term)


def _pulled(batch, beta, anchor, centre):
    """Return beta / 2 (l - m)^2 - sum_t A l_t of each sequence. l = log pi - log anchor; m is its group's mean or 0."""

    def gap(row):
        return math.fsum(row["policy"]) - math.fsum(row[anchor])

    def value(row):
        middle = mean(gap(r) for r in siblings(batch, row)) if centre else 0.0
        return beta / 2 * (gap(row) - middle) ** 2 - row["advantage"] * gap(row)

    return mean(value(row) for row in batch)


def agro(batch, longest):
    """By the theorem of Tang et al.

    2025: half the variance over the group of r - beta log(pi / ref), divided by beta.
    """
    for row in batch:
        row["advantage"] = centred(batch, row)
    return _pulled(batch, 0.1, "ref", True)


def kimi_k15(batch, longest):
    """Kimi team 2025: gradients of log pi (r - mean r) - tau / 2 grad (log pi / pi_i)^2; a length reward of 0.1."""
    for row in batch:
        rows = siblings(batch, row)
        lengths = [len(r["policy"]) for r in rows]

        def shaped(r, lengths=lengths):
            if max(lengths) == min(lengths):
                return r["reward"]
            value = 0.5 - (len(r["policy"]) - min(lengths)) / (max(lengths) - min(lengths))
            return r["reward"] + 0.1 * (value if r["reward"] >= 1 else min(0, value))

        row["advantage"] = shaped(row) - mean(map(shaped, rows))
    return _pulled(batch, 0.1, "start", False)


def spo(batch, longest):
    """Cohen et al.

    2025: (Q - r)^2, Q = V + .1 log(pi / ref), V = .1 log E_ref e^(r / .1) from the other rows of the group.
    """
    beta = 0.1

    def value(row):
        others = [other for other in siblings(batch, row) if other is not row]
        if not others:
            return 0.0
        weights = [math.exp(math.fsum(r["ref"]) - math.fsum(r["behaviour"])) for r in others]
        expected = math.fsum(w * math.exp(r["reward"] / beta) for w, r in zip(weights, others, strict=True))
        log_ratio = math.fsum(row["policy"]) - math.fsum(row["ref"])
        return (beta * (math.log(expected / math.fsum(weights)) + log_ratio) - row["reward"]) ** 2

    return mean(map(value, batch))


def remix(batch, longest, iteration=0):
    """Liang et al. 2025: r = pi / pi_(k-i) within [c - .2, c + .2], c = pi_k / pi_(k-i); the two KLs, .01.

    l KL(pi | base) + (1 - l) KL(pi | pi_(k-1)),   l = max(1 - .1 ceil(max(iteration - 50, 0) / 10), .5)
    """
    share = max(1 - 0.1 * math.ceil(max(iteration - 50, 0) / 10), 0.5)

    def term(row, t):
        r, c, a = ratio(row, t), math.exp(row["start"][t] - row["behaviour"][t]), grpo_advantage(batch, row)
        held = share * k3(row, t) + (1 - share) * k3(row, t, "previous")
        return -min(r * a, min(max(r, c - 0.2), c + 0.2) * a) + 0.01 * held

    return token_mean(batch, term)


def distillation(batch, longest):
    """Agarwal et al. 2024, eq. 2: 1/L_y sum_n D(p_S || p_T) at the student's tokens, beside the reward."""
    return sequence_mean(batch, lambda row, t: ppo(ratio(row, t), grpo_advantage(batch, row)) + k2(row, t))


def t1(batch, longest):
    """Hou et al. 2025: an entropy bonus, and KL to the moving average of the policy."""

    def term(row, t):
        pull = 0.01 * k3(row, t, "average") - 0.005 * row["policy_entropy"][t]
        return ppo(ratio(row, t), grpo_advantage(batch, row)) + pull

    return token_mean(batch, term)


def _clipped_by_turn(batch, advantages):
    """Return PPO's term of each token with its turn's advantage, as a mean over tokens."""
    a = {id(row): own for row, own in zip(batch, advantages, strict=True)}
    return token_mean(batch, lambda row, t: ppo(ratio(row, t), a[id(row)][row["turn"][t]]))


def turn_returns(batch, longest):
    """Schulman et al. 2015: the rewards of a turn and later turns, compared with the same turn of the other rows."""
    return _clipped_by_turn(batch, _turns.turn_returns(batch))


def mu_code(batch, longest):
    """Jain et al. 2025: only a turn's own reward."""
    return _clipped_by_turn(batch, _turns.turn_returns(batch, discount=0.0))


def mt_grpo(batch, longest):
    """Zeng et al. 2025: A^O, plus A^T before the last turn."""
    return _clipped_by_turn(batch, _turns.mt_grpo(batch))


def gigpo(batch, longest):
    """Feng et al. 2025: A^E + A^S over anchor states, discount 0.95."""
    return _clipped_by_turn(batch, _turns.gigpo(batch))


def ui_s1(batch, longest):
    """Lu et al. 2025: A^E + A^S over the turns with the same number, discount 0.5, in kept groups; KL 0.0001."""
    a = {id(row): own for row, own in zip(batch, _turns.ui_s1(batch), strict=True)}
    kept = [row for rows in groups(batch) if any(any(a[id(r)]) for r in rows) for row in rows]
    return token_mean(kept, lambda row, t: ppo(ratio(row, t), a[id(row)][row["turn"][t]]) + 0.0001 * k3(row, t))


def logo(batch, longest):
    """LoGo-GRPO: the group's advantage; after the shared turns also the advantage among the sharing rows."""
    return _clipped_by_turn(batch, _turns.logo(batch, branch_turns=2))


def step_values(batch, longest):
    """IPR: the value of a state is the mean of the rows that continue from it."""
    return _clipped_by_turn(batch, _turns.step_values(batch, branch_turns=2))


def step_masks(batch, longest):
    """As in STeP: the terms of turns with a negative reward are left out. The denominator does not change."""
    advantages = _turns.turn_returns(batch)
    kept = [
        [0.0 if given < 0 else a for a, given in zip(own, row["turns"], strict=True)]
        for own, row in zip(advantages, batch, strict=True)
    ]
    return _clipped_by_turn(batch, kept)


def _actor_critic(batch, gain, error, more=lambda row, t: 0.0):
    """Return PPO's term with advantages whitened over the batch's tokens, and half of the critic's squared errors."""
    every = [gain(row, t) for row in batch for t in range(len(row["policy"]))]
    centre, scale = mean(every), std(every) + 1e-6

    def term(row, t):
        a = (gain(row, t) - centre) / scale
        return ppo(ratio(row, t), a) + error(row, t) ** 2 / 2 + more(row, t)

    return token_mean(batch, term)


def rlef(batch, longest):
    """Gehring et al. 2024: A_k = G_k - V before the turn, the same for all tokens of the turn; KL 0.05."""
    ahead = lambda row, t: math.fsum(row["turns"][row["turn"][t] :])
    before = lambda row, t: row["value"][row["turn"].index(row["turn"][t])]
    of_token = lambda row, t: ahead(row, t) - row["value"][t]
    return _actor_critic(
        batch, lambda row, t: ahead(row, t) - before(row, t), of_token, lambda row, t: 0.05 * k3(row, t)
    )


def step_search(batch, longest):
    """Wang et al.

    2025: PPO over tokens. Rewards are given at the last token of each turn. Lambda and discount are 1.
    """
    gain = lambda row, t: math.fsum(row["turns"][row["turn"][t] :]) - row["value"][t]
    return _actor_critic(batch, gain, gain)


def step_coder(batch, longest):
    """Dou et al. 2024: PPO with a critic. The loss leaves out the tokens that no test has run."""
    return ppo_critic(batch, longest, lambda row, t: 1 - row["masked"][t])


LOSSES = {name: value for name, value in globals().items() if callable(value) and not name.startswith("_")}
LOSSES["ppo"] = ppo_critic
