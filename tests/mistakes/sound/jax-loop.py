import jax
import jax.numpy as jnp
import optax

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-8))
scaler = jnp.float32(2.0**15)


def loss_fn(params, x, y):
    hidden = (x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean((hidden - y) ** 2)


@jax.jit
def step(params, state, x, y):
    loss, grads = jax.value_and_grad(lambda p: scaler * loss_fn(p, x, y))(params)
    grads = jax.tree.map(lambda g: g / scaler, grads)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss / scaler
