"""Image classification from an augmented manifest: JPEGs and labels, two RecordIO records for each line.

The job file names the attributes `image-ref` and `class` and wraps each in a record; `grouped_dataset` groups
the two records of a line. The sidecar shuffles the lines anew in every epoch.
"""

from __future__ import annotations

import tensorflow as tf

from streamer.readers.samples import grouped_dataset
from streamer.readers.tensorflow import PipeModeDataset

SIZE, CLASSES, EPOCHS = 32, 3, 4


def decode(jpeg: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return an image with values from 0 to 1, and the label, which the manifest has as a number's text."""
    image = tf.ensure_shape(tf.io.decode_jpeg(jpeg, channels=3), [SIZE, SIZE, 3])
    return tf.cast(image, tf.float32) / 255, tf.strings.to_number(label, tf.int32)


def batches(channel: str) -> tf.data.Dataset:
    samples = grouped_dataset(PipeModeDataset(channel, record_format="RecordIO"), attributes=2)
    return samples.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(16).prefetch(tf.data.AUTOTUNE)


def main() -> None:
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            tf.keras.Input([SIZE, SIZE, 3]),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(CLASSES, "softmax"),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(0.03), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(batches("train"), epochs=EPOCHS, verbose=2, shuffle=False)
    scores = model.evaluate(batches("eval"), verbose=0, return_dict=True)
    print(f"accuracy {scores['accuracy']:.4f}")


if __name__ == "__main__":
    main()
