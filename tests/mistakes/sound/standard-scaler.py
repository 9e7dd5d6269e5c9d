"""No neural scale here: scikit-learn's scaler, and amplitude called amp."""

import numpy as np
from sklearn.linear_model import SGDRegressor
from sklearn.preprocessing import StandardScaler

rng = np.random.default_rng(0)
amp = rng.uniform(0.5, 2.0, 200)
half = len(amp) // 2
signal = amp[:, None] * rng.normal(size=(200, 8))
scaler = StandardScaler()
train = scaler.fit_transform(signal[:half])
test = scaler.transform(signal[half:])
optimizer = SGDRegressor(max_iter=200).fit(train, amp[:half])
loss = np.mean((optimizer.predict(test) - amp[half:]) ** 2)
print(loss / scaler.scale_.mean(), np.log(loss + 1e-12), np.float16(1e-3))
