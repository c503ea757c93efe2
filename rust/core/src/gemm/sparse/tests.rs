use super::*;
use crate::formats::channels::tests::{case, shape};
use crate::formats::channels::{View, Width};
use crate::gemm::dense::{Dense, Kind, View as Matrix};
use crate::gemm::layer::{Projection, Routing};
use crate::gemm::matmul_grouped;
use crate::pool;
use crate::simd::Isa;
use crate::types::{Mode, Shape};

const TOP_K: usize = 2;

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0;
    (0..count).map(number).collect()
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

/// A layer of three experts, and a token list with repeated experts and one invalid expert.
struct Setting {
    up: Vec<u8>,
    channels: Vec<u8>,
    values: Vec<f32>,
    thresholds: Vec<f32>,
    x: Vec<f32>,
    experts: Vec<i64>,
    weights: Vec<f32>,
    rows: usize,
    columns: usize,
}

impl Setting {
    fn new(width: Width, rows: usize, columns: usize, tokens: usize, threshold: f32) -> Setting {
        let case = case(shape(3, rows, columns), width, threshold);
        let up = numbers(3 * rows * columns, 3);
        Setting {
            up: up.iter().flat_map(|value| value.to_le_bytes()).collect(),
            channels: case.blob,
            values: case.values,
            thresholds: case.thresholds,
            x: numbers(tokens * columns, 5),
            experts: (0..tokens * TOP_K).map(|i| [2, 1, 1, 0, 3, 2][i % 6]).collect(),
            weights: numbers(tokens * TOP_K, 9),
            rows,
            columns,
        }
    }

    fn up(&self, isa: Isa) -> Dense<'_> {
        let Setting { rows, columns, .. } = *self;
        let shape = Shape {
            experts: 3,
            rows,
            columns,
            ndim: 3,
        };
        Dense::new(
            Matrix::of_experts(&self.up, Kind::F32, shape).unwrap(),
            Mode::Auto,
            isa,
        )
        .unwrap()
    }

    fn run(&self, isa: Isa, threads: usize) -> (Vec<f32>, u64) {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let up = self.up(isa);
        let layer = Layer {
            ups: Ups::Of(&up),
            channels: View::parse(&self.channels).unwrap(),
        };
        let routing = Routing {
            experts: &self.experts,
            weights: &self.weights,
            top_k: TOP_K,
        };
        let mut y = vec![f32::NAN; self.x.len()];
        let computed = layer.forward(&self.x[..], routing, &mut y, isa, &pool).unwrap();
        (y, computed)
    }

    /// The outputs of the up projection at a place, as the layer sees them.
    fn ups(&self, token: usize, expert: usize) -> Vec<f32> {
        let (up, mut y) = (self.up(Isa::SCALAR), vec![0.0; self.rows]);
        let offsets: Vec<usize> = (0..=3).map(|e| usize::from(e > expert)).collect();
        let x = &self.x[token * self.columns..][..self.columns];
        matmul_grouped(&up, x, &offsets, &mut y, &pool::current().unwrap()).unwrap();
        y
    }

    /// The layer in f64 after the decisions, the bound of each output's error, and the channels that pass.
    fn naive(&self) -> (Vec<f64>, Vec<f64>, u64) {
        let (mut y, mut bound) = (vec![0.0; self.x.len()], vec![0.0; self.x.len()]);
        let (unit, mut computed) = (2f64.powi(-24), 0);
        for (pair, &expert) in self.experts.iter().enumerate().filter(|(_, expert)| **expert < 3) {
            let (token, expert) = (pair / TOP_K, expert as usize);
            let ups = self.ups(token, expert);
            for (channel, &up) in ups
                .iter()
                .enumerate()
                .filter(|(_, up)| up.abs() >= self.thresholds[expert])
            {
                computed += 1;
                let record =
                    &self.values[(expert * self.rows + channel) * 2 * self.columns..][..2 * self.columns];
                let x = &self.x[token * self.columns..][..self.columns];
                let terms: Vec<f64> = record
                    .iter()
                    .zip(x)
                    .map(|(w, x)| f64::from(*w) * f64::from(*x))
                    .collect();
                let (gate, size) = (
                    terms.iter().sum::<f64>(),
                    terms.iter().map(|t| t.abs()).sum::<f64>(),
                );
                let value = gate / (1.0 + (-gate).exp()) * f64::from(up);
                // The slope of silu is below 1.1; its own rounding takes a few units.
                let error = (1.1 * (self.columns as f64 / 64.0 + 12.0) * unit * size
                    + 16.0 * unit * gate.abs())
                    * f64::from(up).abs();
                let weight = f64::from(self.weights[pair]);
                for column in 0..self.columns {
                    let down = f64::from(record[self.columns + column]);
                    y[token * self.columns + column] += weight * value * down;
                    let rounding = (ups.len() as f64 + 40.0) * unit * value.abs();
                    bound[token * self.columns + column] += weight.abs() * down.abs() * (error + rounding);
                }
            }
        }
        (y, bound, computed)
    }
}

#[test]
fn sparse_layers_are_within_their_bound_and_the_same_on_all_sets_and_threads() {
    for width in Width::ALL {
        for (rows, columns, tokens, threshold) in [
            (1, 1, 1, 0.0),
            (70, 64, 1, 1.0),
            (200, 100, 1, 3.0),
            (150, 130, 7, 2.0),
            (33, 1100, 3, 9.0),
            (90, 2100, 1, 0.5),
        ] {
            let setting = Setting::new(width, rows, columns, tokens, threshold);
            let (y, bound, wanted) = setting.naive();
            let (scalar, computed) = setting.run(Isa::SCALAR, 1);
            assert_eq!(computed, wanted, "{width:?} {rows} x {columns}");
            for ((found, wanted), bound) in scalar.iter().zip(&y).zip(&bound) {
                assert!(
                    (f64::from(*found) - wanted).abs() <= *bound + 1e-30,
                    "{found} {wanted} {bound}"
                );
            }
            for isa in isas() {
                for threads in [1, 2, 8] {
                    assert_eq!(setting.run(isa, threads), (scalar.clone(), computed), "{isa:?}");
                }
            }
        }
    }
}

#[test]
fn thresholds_of_zero_and_infinity_compute_everything_and_nothing() {
    let setting = |step| Setting::new(Width::Int8, 50, 64, 3, step);
    let all = setting(0.0);
    let pairs = all.experts.iter().filter(|expert| **expert < 3).count();
    assert_eq!(all.run(Isa::SCALAR, 1).1, 50 * pairs as u64);
    // The threshold of the first expert stays zero.
    let none = Setting {
        experts: vec![1, 2, 2, 1, 1, 3],
        ..setting(f32::MAX)
    };
    assert_eq!(none.run(Isa::SCALAR, 1), (vec![0.0; 3 * 64], 0));
}

#[test]
fn channels_of_non_zero_given_outputs_are_computed() {
    let pool = pool::current().unwrap();
    for (rows, columns, tokens) in [(1, 1, 1), (200, 100, 1), (150, 130, 7)] {
        let setting = Setting::new(Width::Int8, rows, columns, tokens, 2.0);
        let passing = |(pair, &expert): (usize, &i64)| {
            let known = usize::try_from(expert).unwrap().min(2);
            let skipped = |up: f32| up.abs() < setting.thresholds[known] || expert > 2;
            let ups = setting.ups(pair / TOP_K, known).into_iter();
            ups.map(move |up| if skipped(up) { 0.0 } else { up })
                .collect::<Vec<f32>>()
        };
        let given: Vec<f32> = setting.experts.iter().enumerate().flat_map(passing).collect();
        let forward = |ups: &[f32]| {
            let layer = Layer {
                ups: Ups::Given(ups),
                channels: View::parse(&setting.channels).unwrap(),
            };
            let routing = Routing {
                experts: &setting.experts,
                weights: &setting.weights,
                top_k: TOP_K,
            };
            let mut y = vec![f32::NAN; setting.x.len()];
            let computed = layer.forward(&setting.x[..], routing, &mut y, Isa::SCALAR, &pool)?;
            crate::Result::Ok((y, computed))
        };
        assert_eq!(forward(&given).unwrap(), setting.run(Isa::SCALAR, 1));
        assert!(forward(&given[1..]).is_err());
    }
}

#[test]
fn records_refine_coarse_gates_and_return_the_inner_values() {
    let setting = Setting::new(Width::Int4, 150, 130, 7, 0.0);
    let count = setting.experts.len() * setting.rows;
    let ups: Vec<f32> = numbers(count, 4)
        .into_iter()
        .map(|up| if up.abs() < 0.6 { 0.0 } else { up })
        .collect();
    let before = numbers(count, 8);
    let routing = Routing {
        experts: &setting.experts,
        weights: &setting.weights,
        top_k: TOP_K,
    };
    let refine = |gates: &[f32], isa: Isa, threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let layer = Layer {
            ups: Ups::Refining { ups: &ups, gates },
            channels: View::parse(&setting.channels).unwrap(),
        };
        let (mut y, mut inner) = (vec![f32::NAN; setting.x.len()], before.clone());
        let computed = layer.refine(&setting.x[..], routing, &mut y, &mut inner, isa, &pool)?;
        crate::Result::Ok((y, inner, computed))
    };
    let gates = numbers(count, 6);
    let (y, inner, computed) = refine(&gates, Isa::SCALAR, 1).unwrap();
    let mut outputs = vec![0.0; y.len()];
    let mut wanted = 0;
    for (at, (&up, &value)) in ups.iter().zip(&inner).enumerate() {
        let (pair, channel) = (at / setting.rows, at % setting.rows);
        let (token, expert) = (pair / TOP_K, setting.experts[pair] as usize);
        if up == 0.0 || expert > 2 {
            assert_eq!(value, before[at]);
            continue;
        }
        wanted += 1;
        let columns = setting.columns;
        let (gate, down) = setting.values[(expert * setting.rows + channel) * 2 * columns..][..2 * columns]
            .split_at(columns);
        let x = &setting.x[token * columns..][..columns];
        let product: f64 = gate
            .iter()
            .zip(x)
            .map(|(w, x)| f64::from(*w) * f64::from(*x))
            .sum();
        let sum = product + f64::from(gates[at]);
        let exact = sum / (1.0 + (-sum).exp()) * f64::from(up);
        assert!(
            (f64::from(value) - exact).abs() <= 1e-4 * (1.0 + exact.abs()),
            "{value} {exact}"
        );
        for (y, down) in outputs[token * columns..][..columns].iter_mut().zip(down) {
            *y += f64::from(setting.weights[pair]) * f64::from(value) * f64::from(*down);
        }
    }
    assert_eq!(computed, wanted);
    for (found, exact) in y.iter().zip(&outputs) {
        assert!(
            (f64::from(*found) - exact).abs() <= 1e-3 * (1.0 + exact.abs()),
            "{found} {exact}"
        );
    }
    for isa in isas() {
        assert_eq!(
            refine(&gates, isa, 8).unwrap(),
            (y.clone(), inner.clone(), computed),
            "{isa:?}"
        );
    }
    assert!(refine(&gates[1..], Isa::SCALAR, 1).is_err());
}

#[test]
fn nan_reaches_the_output() {
    let mut setting = Setting::new(Width::Bf16, 20, 64, 1, 1e30);
    setting.experts = vec![1, 2];
    setting.x[3] = f32::NAN;
    assert!(setting.run(Isa::SCALAR, 1).0.iter().all(|value| value.is_nan()));
}

#[test]
fn sizes_that_do_not_match_are_refused() {
    let setting = Setting::new(Width::Int4, 20, 64, 2, 0.0);
    let other = Setting::new(Width::Int4, 20, 32, 2, 0.0);
    let (up, pool) = (setting.up(Isa::SCALAR), pool::current().unwrap());
    let forward = |channels: &[u8], experts: &[i64], x: &[f32]| {
        let layer = Layer {
            ups: Ups::Of(&up),
            channels: View::parse(channels).unwrap(),
        };
        let routing = Routing {
            experts,
            weights: &setting.weights,
            top_k: TOP_K,
        };
        layer.forward(x, routing, &mut vec![0.0; x.len()], Isa::SCALAR, &pool)
    };
    assert!(forward(&setting.channels, &setting.experts, &setting.x).is_ok());
    assert!(forward(&other.channels, &setting.experts, &setting.x).is_err());
    assert!(forward(&setting.channels, &setting.experts[1..], &setting.x).is_err());
    assert!(forward(&setting.channels, &setting.experts, &setting.x[1..]).is_err());
}

#[test]
fn records_multiply_as_rows() {
    for width in Width::ALL {
        let setting = Setting::new(width, 9, 70, 3, 0.0);
        let x = numbers(3 * 140, 2);
        for isa in isas() {
            let records = Records::new(View::parse(&setting.channels).unwrap(), Mode::Auto, isa).unwrap();
            let mut y = vec![0.0; 3 * 9];
            matmul_grouped(&records, &x[..], &[0, 1, 1, 3], &mut y, &pool::current().unwrap()).unwrap();
            for (at, &found) in y.iter().enumerate() {
                let (token, row) = (at / 9, at % 9);
                let values = &setting.values[([0, 2, 2][token] * 9 + row) * 140..][..140];
                let terms: Vec<f64> = values
                    .iter()
                    .zip(&x[token * 140..])
                    .map(|(w, x)| f64::from(*w) * f64::from(*x))
                    .collect();
                let bound = 20.0 * 2f64.powi(-24) * terms.iter().map(|term| term.abs()).sum::<f64>();
                assert!((f64::from(found) - terms.iter().sum::<f64>()).abs() <= bound);
            }
            assert_eq!(records.memory(1, 2..4).len(), 2 * records.row_bytes());
        }
    }
}
