//! Naive implementations of the computations of a step.

use super::*;

/// The formulas, evaluated sequentially in f64.
pub struct Naive<'a> {
    pub tensors: &'a Tensors,
    /// For each layer, keys and values of each token, groups x width.
    pub caches: Vec<Vec<[Vec<f64>; 2]>>,
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

fn matvec(matrix: &[f32], x: &[f64]) -> Vec<f64> {
    let row = |row: &[f32]| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum();
    matrix.chunks_exact(x.len()).map(row).collect()
}

fn added(mut x: Vec<f64>, y: &[f64], factor: f64) -> Vec<f64> {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += factor * y);
    x
}

impl Naive<'_> {
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let y = matvec(self.tensors.values(name), x);
        let bias = wide(self.tensors.values(&format!("{name}.bias")));
        added(y, &bias, if self.tensors.settings.bias { 1.0 } else { 0.0 })
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = wide(self.tensors.values(name));
        let runs = x.chunks_exact(weight.len()).flat_map(|x| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
            x.iter()
                .zip(&weight)
                .map(move |(x, weight)| x * factor * weight)
                .collect::<Vec<_>>()
        });
        runs.collect()
    }

    fn turned(&self, x: &[f64], position: usize) -> Vec<f64> {
        let half = self.tensors.frequencies.len();
        let mut y = x.to_vec();
        for (head, out) in x.chunks_exact(WIDTH).zip(y.chunks_exact_mut(WIDTH)) {
            for pair in 0..half {
                let angle = position as f64 * f64::from(self.tensors.frequencies[pair]);
                let (sin, cos) = (1.25 * angle.sin(), 1.25 * angle.cos());
                out[pair] = head[pair] * cos - head[pair + half] * sin;
                out[pair + half] = head[pair + half] * cos + head[pair] * sin;
            }
        }
        y
    }

    fn attention(&mut self, layer: usize, x: &[f64], position: usize) -> Vec<f64> {
        let name = |name: &str| format!("{layer}.{name}");
        let x = self.norm(&name("in.norm"), x);
        let head = |part: &str| {
            let heads = self.linear(&name(part), &x);
            match self.tensors.settings.head_norms {
                Some(_) => self.norm(&name(&format!("{part}.norm")), &heads),
                None => heads,
            }
        };
        let settings = self.tensors.settings;
        let queries = self.turned(&head("q"), position);
        let gates = self.linear(&name("gates"), &x);
        let keys = self.turned(&head("k"), position);
        let values = self.linear(&name("v"), &x);
        self.caches[layer].push([keys, values]);
        let mut mixed = Vec::new();
        for (head, query) in queries.chunks_exact(WIDTH).enumerate() {
            let group = head / (HEADS / GROUPS) * WIDTH..(head / (HEADS / GROUPS) + 1) * WIDTH;
            let cache = &self.caches[layer];
            let seen = settings
                .window
                .map_or(0, |window| cache.len().saturating_sub(window));
            let past = cache[seen..].iter();
            let score =
                |keys: &[f64]| 0.4f32 as f64 * keys.iter().zip(query).map(|(k, q)| k * q).sum::<f64>();
            let powers: Vec<f64> = past
                .clone()
                .map(|[keys, _]| score(&keys[group.clone()]).exp())
                .collect();
            let sink = f64::from(self.tensors.values(&name("sinks"))[head]).exp();
            let total: f64 = powers.iter().sum::<f64>() + if settings.sinks { sink } else { 0.0 };
            let terms = past
                .zip(&powers)
                .map(|([_, values], power)| (&values[group.clone()], power / total));
            mixed.extend(terms.fold(vec![0.0; WIDTH], |sum, (values, share)| added(sum, values, share)));
        }
        if settings.gated {
            let gated = mixed.iter_mut().zip(&gates);
            gated.for_each(|(mixed, gate)| *mixed /= 1.0 + (-gate).exp());
        }
        self.linear(&name("o"), &mixed)
    }

    fn expert(&self, parts: [&[f32]; 3], x: &[f64]) -> Vec<f64> {
        let [gate, up] = [parts[0], parts[1]].map(|matrix| matvec(matrix, x));
        let hidden: Vec<f64> = gate
            .iter()
            .zip(&up)
            .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
            .collect();
        matvec(parts[2], &hidden)
    }

    fn feed_forward(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let name = |name: &str| format!("{layer}.{name}");
        let x = self.norm(&name("middle.norm"), x);
        let mut chosen = vec![(0, 1.0)];
        if self.tensors.settings.router {
            let logits = matvec(self.tensors.values(&name("router")), &x);
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let power = |&expert: &usize| (expert, logits[expert].exp());
            chosen = order[..2].iter().map(power).collect();
            let total: f64 = chosen.iter().map(|(_, power)| power).sum();
            chosen.iter_mut().for_each(|(_, power)| *power /= total);
        }
        let mut y = vec![0.0; HIDDEN];
        for (expert, weight) in chosen {
            let size = INNER * HIDDEN;
            let of = |part: &str| &self.tensors.values(&name(part))[expert * size..][..size];
            y = added(y, &self.expert([of("gate"), of("up"), of("down")], &x), weight);
        }
        if self.tensors.settings.shared {
            let of = |part: &str| self.tensors.values(&name(part));
            let share = matvec(of("shared_gate"), &x)[0];
            let parts = [of("shared.gate"), of("shared.up"), of("shared.down")];
            y = added(y, &self.expert(parts, &x), 1.0 / (1.0 + (-share).exp()));
        }
        y
    }

    pub fn step(&mut self, x: &[f32], position: usize) -> Vec<f64> {
        let mut x = wide(x);
        for layer in 0..self.tensors.settings.layers {
            x = added(self.attention(layer, &x, position), &x, 1.0);
            x = added(self.feed_forward(layer, &x), &x, 1.0);
        }
        self.norm("norm", &x)
    }
}
