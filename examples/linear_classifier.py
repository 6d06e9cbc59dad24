"""A linear classifier in Keras on two Pipe channels: `train` in every epoch, `eval` after each.

The program replaces LinearClassifier of TensorFlow 1 with SageMaker's PipeModeDataset. Every pass of Keras
over a dataset reads the channel's next epoch. Batches are vectors, which are parsed whole.
"""

from __future__ import annotations

import tensorflow as tf

from streamer.readers.tensorflow import PipeModeDataset

DIMENSIONS, CLASSES, EPOCHS = 1024, 10, 2
FEATURES = {"label": tf.io.FixedLenFeature([], tf.int64), "data": tf.io.FixedLenFeature([], tf.string)}


def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Parse a vector of tf.train.Example records into vectors and labels."""
    examples = tf.io.parse_example(records, FEATURES)
    vectors = tf.ensure_shape(tf.io.decode_raw(examples["data"], tf.float64), [None, DIMENSIONS])
    return tf.cast(vectors, tf.float32), examples["label"]


def batches(channel: str) -> tf.data.Dataset:
    dataset = PipeModeDataset(channel, record_format="TFRecord", batch_size=32)
    return dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def main() -> None:
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input([DIMENSIONS]), tf.keras.layers.Dense(CLASSES, "softmax")])
    model.compile(tf.keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        batches("train"), validation_data=batches("eval"), epochs=EPOCHS, verbose=2, shuffle=False
    )
    print(f"accuracy {history.history['val_accuracy'][-1]:.4f}")


if __name__ == "__main__":
    main()
