"""Steps of programs that are built with other packages, for `benchmarks.real_programs`.

Sizes are small and weights are random. Each function imports its package itself, so that the other
programs run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

ROWS = 8
"""The size of the batch, of chains and of environments."""

SPLIT = "data:S(0)"

EPSILON = 1e-3
"""Of Adam, which divides by the size of a gradient: with less, it turns the rounding of gradients
that are zero (of a bias before a normalization) into whole steps."""


class Program(NamedTuple):
    """A step and its first arguments.

    Arguments:
      step: `(state, *batch) -> (state, result)`.
      state: the first state.
      batch: pytrees that a split batch splits on dim 0.
      state_types: types of the state under a split batch.
    """

    step: Callable[..., Any]
    state: Any
    batch: tuple[Any, ...] = ()
    state_types: Any = None


def rows(_: Any, aval: Any) -> str | None:
    """Splits the arrays of a state that have a row for each chain or environment."""
    return SPLIT if aval.shape[:1] == (ROWS,) else None


def key(seed: int) -> jax.Array:
    return jax.random.key(seed)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(key(seed), shape)


def integers(seed: int, below: int, *shape: int) -> jax.Array:
    return jax.random.randint(key(seed), shape, 0, below)


LABELS = jnp.arange(ROWS) % 4


def trained(loss: Callable[..., Any], params: Any, *batch: Any) -> Program:
    """Training of `loss(params, *batch)` with AdamW."""
    optimizer = optax.adamw(1e-2, eps=EPSILON)

    def step(state: Any, *batch: Any) -> Any:
        params, inner = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, inner = optimizer.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return Program(step, (params, optimizer.init(params)), batch)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


# ---- Keras --------------------------------------------------------------------------------------


def keras_step(model: Any, x: Any) -> Program:
    """Training with Keras' loss and optimizer; the state has the seeds of dropout."""
    import keras

    optimizer = keras.optimizers.Adam(1e-2, epsilon=EPSILON)
    optimizer.build(model.trainable_variables)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trainable: Any, rest: Any, x: Any, labels: Any) -> Any:
        logits, rest = model.stateless_call(trainable, rest, x, training=True)
        return crossentropy(labels, logits), rest

    def step(state: Any, x: Any, labels: Any) -> Any:
        trainable, rest, inner = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(trainable, rest, x, labels)
        trainable, inner = optimizer.stateless_apply(inner, grads, trainable)
        return [trainable, rest, inner], value

    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    return Program(step, [[v.value for v in group] for group in variables], (x, LABELS))


def keras_convolutions() -> Program:
    """Convolutions, batch normalization and dropout."""
    from keras import Sequential, layers

    model = Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.SeparableConv2D(16, 3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )
    return keras_step(model, normal(1, ROWS, 8, 8, 3))


def keras_recurrent() -> Program:
    """A bidirectional LSTM over tokens, and attention."""
    from keras import Input, Model, layers

    tokens = Input((12,), dtype="int32")
    x = layers.Embedding(32, 16)(tokens)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 4)(x, x))
    model = Model(tokens, layers.Dense(4)(layers.GlobalMaxPooling1D()(x)))
    return keras_step(model, integers(1, 32, ROWS, 12))


# ---- Flax ---------------------------------------------------------------------------------------


def flax_nnx_decoder() -> Program:
    """A decoder layer with dropout, which `nnx.Optimizer` trains."""
    from flax import nnx

    class Decoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(32, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
            self.norm, self.dropout = nnx.RMSNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
            return self.embed.attend(self.dropout(x))

    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=EPSILON), wrt=nnx.Param)
    definition, state = nnx.split((model, optimizer))

    def step(state: Any, tokens: Any) -> Any:
        model, optimizer = nnx.merge(definition, state)
        value, grads = nnx.value_and_grad(lambda m: next_token_loss(m(tokens), tokens))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return Program(step, state, (integers(1, 32, ROWS, 12),))


def flax_linen_gru() -> Program:
    """A rematerialized GRU over sequences of several lengths."""
    from flax import linen

    class Predictor(linen.Module):
        @linen.compact
        def __call__(self, x: Any, lengths: Any) -> Any:
            cell = linen.remat(linen.GRUCell)(16)
            return linen.Dense(4)(linen.RNN(cell)(x, seq_lengths=lengths))

    model, x, lengths = Predictor(), normal(1, ROWS, 6, 4), 1 + jnp.arange(ROWS) % 6

    def loss(params: Any, x: Any, lengths: Any) -> Any:
        errors = optax.l2_loss(model.apply(params, x, lengths), x).sum(-1)
        return jnp.mean(errors, where=jnp.arange(6) < lengths[:, None])

    return trained(loss, model.init(key(0), x, lengths), x, lengths)


# ---- Penzai -------------------------------------------------------------------------------------


def penzai_gemma() -> Program:
    """Two blocks of a Transformer in the form of Gemma, with named axes."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=16,
        projection_dim=8,
        mlp_hidden_dim=32,
        num_decoder_blocks=2,
        vocab_size=32,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
        attention_type=llamalike_common.AttentionTypeSlidingWindowCausal(4),
    )
    model = llamalike_common.build_llamalike_transformer(config, key(0))
    unbound, weights = pz.unbind_params(model, freeze=True)

    def loss(weights: Any, tokens: Any) -> Any:
        logits = pz.bind_variables(unbound, weights)(pz.nx.wrap(tokens, "batch", "seq"))
        return next_token_loss(logits.unwrap("batch", "seq", "vocabulary"), tokens)

    return trained(loss, weights, integers(1, 32, ROWS, 12))


def penzai_dropout() -> Program:
    """Layers with dropout, whose random stream is part of the state."""
    from penzai import pz
    from penzai.models.simple_mlp import DropoutMLP

    unbound, weights = pz.unbind_params(
        DropoutMLP.from_config(key(0), [8, 32, 8], 0.2), freeze=True
    )

    def loss(weights: Any, stream: Any, x: Any) -> Any:
        network = pz.bind_variables(unbound, weights)
        random_stream = pz.RandomStream.from_base_key(stream)
        out = network(pz.nx.wrap(x, "batch", "features"), random_stream=random_stream)
        return optax.l2_loss(out.unwrap("batch", "features"), x).mean()

    def step(state: Any, x: Any) -> Any:
        weights, stream = state
        now, stream = jax.random.split(stream)
        value, grads = jax.value_and_grad(loss)(weights, now, x)
        return (
            optax.apply_updates(weights, jax.tree.map(lambda g: -0.1 * g, grads)),
            stream,
        ), value

    return Program(step, (weights, key(2)), (normal(3, ROWS, 8),))


# ---- Brax and MCTX ------------------------------------------------------------------------------


def brax_ants() -> Program:
    """Rigid-body physics of ants, which given actions move."""
    from brax import envs

    env = envs.create("ant", batch_size=ROWS, backend="spring", episode_length=2)

    def step(state: Any, actions: Any) -> Any:
        state = env.step(state, actions)
        return state, state.reward

    state = jax.jit(env.reset)(jax.random.PRNGKey(0))
    return Program(step, state, (jnp.tanh(normal(1, ROWS, env.action_size)),), rows)


def brax_ppo() -> Program:
    """Unrolls of a policy in an environment without physics, and a PPO update."""
    from brax import envs
    from brax.training import acting
    from brax.training.agents.ppo import losses, networks

    env = envs.create("fast", batch_size=ROWS)
    ppo = networks.make_ppo_networks(
        env.observation_size, env.action_size, value_hidden_layer_sizes=(16,)
    )
    params = losses.PPONetworkParams(
        ppo.policy_network.init(key(1)), ppo.value_network.init(key(2))
    )

    def step(state: Any) -> Any:
        params, environment, seed = state
        seed, act, learn = jax.random.split(seed, 3)
        policy = networks.make_inference_fn(ppo)((None, params.policy, params.value))
        extra = ("truncation",)
        environment, data = acting.generate_unroll(env, environment, policy, act, 4, extra)
        data = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data)
        grads, metrics = jax.grad(losses.compute_ppo_loss, has_aux=True)(
            params, None, data, learn, ppo
        )
        params = jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)
        return (params, environment, seed), metrics

    state = params, jax.jit(env.reset)(jax.random.PRNGKey(0)), key(3)
    return Program(step, state, (), (None, rows, None))


def mctx_step(policy: Callable[..., Any], batch: Any) -> Program:
    """Search from each row of a batch, and training of the prior towards what it finds."""
    import mctx

    params = {"next": normal(1, 4, 16, 16) / 4, "prior": normal(2, 16, 4), "value": normal(3, 16)}

    def inside(params: Any, _: Any, action: Any, x: Any) -> Any:
        x = jnp.tanh(jnp.einsum("bi,bij->bj", x, params["next"][action]))
        value = jnp.tanh(x @ params["value"])
        output = mctx.RecurrentFnOutput(
            reward=x[:, 0],
            discount=jnp.full_like(value, 0.9),
            prior_logits=x @ params["prior"],
            value=value,
        )
        return output, x

    def step(state: Any, x: Any) -> Any:
        params, seed = state
        now, seed = jax.random.split(seed)
        root = mctx.RootFnOutput(
            prior_logits=x @ params["prior"], value=jnp.tanh(x @ params["value"]), embedding=x
        )
        found = policy(params, now, root, inside, num_simulations=8)

        def loss(prior: Any) -> Any:
            return optax.softmax_cross_entropy(x @ prior, found.action_weights).mean()

        value, grads = jax.value_and_grad(loss)(params["prior"])
        return (params | {"prior": params["prior"] - 0.1 * grads}, seed), (value, found.action)

    return Program(step, (params, key(4)), (batch,))


def mctx_gumbel() -> Program:
    """Gumbel MuZero search."""
    import mctx

    return mctx_step(mctx.gumbel_muzero_policy, normal(5, ROWS, 16))


def mctx_muzero() -> Program:
    """MuZero search with noise at the root."""
    import mctx

    return mctx_step(mctx.muzero_policy, normal(5, ROWS, 16))


# ---- particles, graphs and symmetry -------------------------------------------------------------


def jax_md_replicas() -> Program:
    """Replicas of a periodic system with Lennard-Jones forces and a Nose-Hoover thermostat."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(4.0)
    start, move = simulate.nvt_nose_hoover(
        energy.lennard_jones_pair(displacement), shift, 1e-3, 0.1
    )
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(3.0)] * 2), -1).reshape(9, 2) * 4 / 3
    state = jax.vmap(lambda seed: start(seed, grid))(jax.random.split(key(0), ROWS))

    def step(state: Any) -> Any:
        state = jax.vmap(move)(state)
        return state, state.position

    return Program(step, state, (), rows)


def jax_md_neighbors() -> Program:
    """Particles in a box with a neighbor list, under friction and noise."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(6.0)
    neighbors, potential = energy.lennard_jones_neighbor_list(
        displacement, 6.0, r_cutoff=1.5, r_onset=1.2
    )
    start, move = simulate.nvt_langevin(potential, shift, 1e-3, 0.1)
    places = jnp.stack(jnp.meshgrid(*[jnp.arange(4.0)] * 2), -1).reshape(16, 2) * 1.5
    near = neighbors.allocate(places)

    def step(state: Any) -> Any:
        state, near = state
        near = near.update(state.position)
        state = move(state, neighbor=near)
        return (state, near), potential(state.position, neighbor=near)

    def particles(_: Any, aval: Any) -> str | None:
        return SPLIT if aval.shape == places.shape else None

    state = start(jax.random.PRNGKey(0), places, neighbor=near)
    return Program(step, (state, near), (), particles)


def jraph_graphs() -> Any:
    """Padded graphs, a row each."""
    import jraph

    return jraph.GraphsTuple(
        nodes=normal(1, ROWS, 6, 4),
        edges=normal(2, ROWS, 10, 4),
        senders=integers(3, 5, ROWS, 10),
        receivers=integers(4, 5, ROWS, 10),
        globals=normal(5, ROWS, 2, 4),
        n_node=jnp.tile(jnp.array([5, 1]), (ROWS, 1)),
        n_edge=jnp.tile(jnp.array([10, 0]), (ROWS, 1)),
    )


def jraph_attention() -> Program:
    """A graph network with attention over edges."""
    import jraph

    def loss(weights: Any, graphs: Any, labels: Any) -> Any:
        def update(w: Any) -> Any:
            return lambda *parts: jnp.tanh(jnp.concatenate(parts, -1) @ w)

        network = jraph.GraphNetwork(
            *map(update, weights),
            attention_logit_fn=lambda edges, *_: edges[:, :1],
            attention_reduce_fn=lambda edges, shares: edges * shares,
        )
        logits = jax.vmap(lambda graph: network(network(graph)).globals[0])(graphs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    weights = [normal(10 + size, size, 4) / 4 for size in (16, 16, 12)]
    return trained(loss, weights, jraph_graphs(), LABELS)


def jraph_convolution() -> Program:
    """Graph convolution over all graphs as one, with classes of nodes."""
    import jraph

    graphs = jraph_graphs()

    def loss(weights: Any, nodes: Any, labels: Any) -> Any:
        graph = jraph.batch([jax.tree.map(lambda x, n=n: x[n], graphs) for n in range(ROWS)])
        graph = graph._replace(nodes=nodes.reshape(-1, 4))
        for w in weights:
            graph = jraph.GraphConvolution(lambda x, w=w: jnp.tanh(x @ w), add_self_edges=True)(
                graph
            )
        return optax.softmax_cross_entropy_with_integer_labels(
            graph.nodes, labels.reshape(-1)
        ).mean()

    weights = [normal(10, 4, 16) / 2, normal(11, 16, 4) / 4]
    return trained(loss, weights, graphs.nodes, integers(6, 4, ROWS, 6))


def e3nn_network() -> Any:
    """Equivariant messages between all particles of a cloud, as a Linen module."""
    import e3nn_jax as e3nn
    from flax import linen

    class Network(linen.Module):
        @linen.compact
        def __call__(self, places: Any) -> Any:
            away = places[:, None] - places[None]
            length = jnp.sqrt(jnp.sum(away**2, -1, keepdims=True) + 1e-6)
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", e3nn.IrrepsArray("1o", away), True)
            x = e3nn.IrrepsArray("0e", jnp.ones((len(places), 1)))
            for _ in range(2):
                x = e3nn.flax.Linear("4x0e + 4x1o + 4x2e")(x)
                x = e3nn.tensor_product(x[None], harmonics, filter_ir_out="0e + 1o + 2e")
                radial = e3nn.flax.MultiLayerPerceptron((8, x.irreps.num_irreps), jax.nn.silu)
                x = e3nn.sum(x * radial(e3nn.bessel(length[..., 0], 4, 3.0)), 1) / len(places)
                x = e3nn.gate(e3nn.flax.Linear("8x0e + 4x1o")(x))
            return e3nn.flax.Linear("4x0e")(x).array.mean(0)

    return Network()


def e3nn_classes() -> Program:
    """Classes of point clouds."""
    model, clouds = e3nn_network(), normal(1, ROWS, 5, 3)

    def loss(params: Any, clouds: Any, labels: Any) -> Any:
        logits = jax.vmap(lambda places: model.apply(params, places))(clouds)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return trained(loss, model.init(key(0), clouds[0]), clouds, LABELS)


def e3nn_forces() -> Program:
    """Training on forces: the gradient of a gradient."""
    model, clouds = e3nn_network(), normal(1, ROWS, 4, 3)

    def loss(params: Any, clouds: Any, forces: Any) -> Any:
        found = jax.vmap(jax.grad(lambda places: model.apply(params, places).sum()))(clouds)
        return optax.l2_loss(found, forces).mean()

    return trained(loss, model.init(key(0), clouds[0]), clouds, normal(2, ROWS, 4, 3))


# ---- differential equations and transport -------------------------------------------------------


def diffrax_field(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["in"]) @ params["out"]


def diffrax_params() -> Any:
    return {"in": normal(1, 4, 16) / 2, "out": normal(2, 16, 4) / 4}


def diffrax_neural_ode() -> Program:
    """A neural ODE for each row, with adaptive steps and checkpointed gradients."""
    import diffrax

    def loss(params: Any, x: Any, y: Any) -> Any:
        def end(x: Any) -> Any:
            term = diffrax.ODETerm(lambda t, x, args: diffrax_field(params, x))
            control = diffrax.PIDController(rtol=1e-3, atol=1e-4)
            solver = diffrax.Tsit5()
            return diffrax.diffeqsolve(
                term, solver, 0.0, 1.0, 0.1, x, stepsize_controller=control, max_steps=16
            ).ys[0]

        return optax.l2_loss(jax.vmap(end)(x), y).mean()

    return trained(loss, diffrax_params(), normal(3, ROWS, 4), normal(4, ROWS, 4))


def diffrax_sde() -> Program:
    """A neural SDE along a Brownian tree."""
    import diffrax
    import lineax

    def loss(params: Any, x: Any, y: Any) -> Any:
        tree = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, x.shape, jax.random.PRNGKey(5))
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, x, args: diffrax_field(params, x)),
            diffrax.ControlTerm(
                lambda t, x, args: lineax.DiagonalLinearOperator(0.1 * jnp.cos(x)), tree
            ),
        )
        save = diffrax.SaveAt(ts=jnp.linspace(0.5, 1.0, 3))
        found = diffrax.diffeqsolve(terms, diffrax.EulerHeun(), 0.0, 1.0, 0.25, x, saveat=save)
        return optax.l2_loss(found.ys.mean(0), y).mean()

    return trained(loss, diffrax_params(), normal(3, ROWS, 4), normal(4, ROWS, 4))


def ott_divergence() -> Program:
    """Points that flow to others along the gradient of the Sinkhorn divergence."""
    from ott.tools import sinkhorn_divergence

    def loss(x: Any, y: Any) -> Any:
        return sinkhorn_divergence.sinkdiv(x, y, epsilon=0.1)[0]

    return trained(loss, normal(1, 16, 3), normal(2, 16, 3) + 1)


def ott_gromov_wasserstein() -> Program:
    """A linear map of each cloud, trained by its Gromov-Wasserstein cost to another."""
    from ott.geometry import pointcloud
    from ott.solvers import quadratic

    def loss(w: Any, clouds: Any, others: Any) -> Any:
        def cost(x: Any, y: Any) -> Any:
            pairs = pointcloud.PointCloud(x @ w), pointcloud.PointCloud(y)
            # With epsilon 0.1, clouds larger by 1e-6 have a gradient that differs by 2 %.
            return quadratic.solve(*pairs, epsilon=3.0, max_iterations=5).reg_gw_cost

        return jax.vmap(cost)(clouds, others).mean()

    return trained(loss, jnp.eye(3), normal(1, ROWS, 6, 3), normal(2, ROWS, 6, 2))


# ---- sampling -----------------------------------------------------------------------------------


def log_density(x: Any) -> Any:
    """A curved valley."""
    return -jnp.sum((1 - x[:-1]) ** 2 + 5 * (x[1:] - x[:-1] ** 2) ** 2)


def blackjax_step(kernel: Any) -> Program:
    """A chain for each row."""

    def step(state: Any) -> Any:
        chains, seed = state
        now, seed = jax.random.split(seed)
        return (
            *jax.vmap(kernel.step)(jax.random.split(now, ROWS), chains)[:1],
            seed,
        ), chains.position

    chains = jax.vmap(kernel.init)(normal(1, ROWS, 4) / 2)
    return Program(step, (chains, key(2)), (), (rows, None))


def blackjax_hmc() -> Program:
    """Hamiltonian Monte Carlo."""
    import blackjax

    return blackjax_step(blackjax.hmc(log_density, 0.05, jnp.ones(4), 8))


def blackjax_nuts() -> Program:
    """The No-U-Turn Sampler."""
    import blackjax

    return blackjax_step(blackjax.nuts(log_density, 0.1, jnp.ones(4), max_num_doublings=4))


def numpyro_model(x: Any, y: Any) -> None:
    """Logistic regression with a scale of the weights."""
    import numpyro
    from numpyro import distributions

    scale = numpyro.sample("scale", distributions.HalfNormal(1.0))
    w = numpyro.sample("w", distributions.Normal(jnp.zeros(3), scale).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", distributions.Bernoulli(logits=x @ w), obs=y)


def numpyro_svi() -> Program:
    """Stochastic variational inference with a normal guide."""
    from numpyro import infer, optim

    guide = infer.autoguide.AutoMultivariateNormal(numpyro_model)
    svi = infer.SVI(numpyro_model, guide, optim.Adam(1e-2), infer.Trace_ELBO(4))
    batch = normal(1, 16, 3), integers(2, 2, 16)
    return Program(svi.update, svi.init(key(0), *batch), batch)


def numpyro_nuts() -> Program:
    """The No-U-Turn Sampler while it adapts to the posterior."""
    from numpyro import infer

    kernel = infer.NUTS(numpyro_model, step_size=0.1, max_tree_depth=4)
    batch = normal(1, 16, 3), integers(2, 2, 16)

    def step(state: Any, x: Any, y: Any) -> Any:
        state = kernel.sample(state, (x, y), {})
        return state, state.z

    return Program(step, kernel.init(key(0), 10, None, batch, {}), batch)


PROGRAMS = (
    keras_convolutions,
    keras_recurrent,
    flax_nnx_decoder,
    flax_linen_gru,
    penzai_gemma,
    penzai_dropout,
    brax_ants,
    brax_ppo,
    mctx_gumbel,
    mctx_muzero,
    jax_md_replicas,
    jax_md_neighbors,
    jraph_attention,
    jraph_convolution,
    e3nn_classes,
    e3nn_forces,
    diffrax_neural_ode,
    diffrax_sde,
    ott_divergence,
    ott_gromov_wasserstein,
    blackjax_hmc,
    blackjax_nuts,
    numpyro_svi,
    numpyro_nuts,
)
