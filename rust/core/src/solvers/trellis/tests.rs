//! Every instruction set compared with simple searches.

use super::cells::Cells;
use super::*;
use crate::formats::coded::tests::Random;
use crate::pool;

const INDICES: usize = 63;

fn isas() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

/// Lengths that grow from zero, approximately like those of a coder.
fn lengths(indices: usize) -> Vec<f32> {
    let middle = indices as i32 / 2;
    (-middle..=middle)
        .map(|index| 1.0 + 0.4 * index.abs() as f32 + 0.1 * (index % 3) as f32)
        .collect()
}

fn weights(count: usize, deviation: f32) -> Vec<f32> {
    let mut random = Random(7);
    (0..count).map(|_| random.normal(deviation)).collect()
}

fn rounded(problem: Problem, isa: Isa) -> Result<Vec<i32>> {
    let mut found = vec![0i32; problem.weights.len()];
    round(problem, &mut found, isa, &*pool::current()?)?;
    Ok(found)
}

fn problem<'a>(weights: &'a [f32], columns: usize, lengths: &'a [f32], price: f64) -> Problem<'a> {
    Problem {
        weights: weights.into(),
        columns,
        step: 0.7,
        width: 1.0,
        lengths,
        integers: INDICES,
        price,
    }
}

/// The index of a code in a state; the state must have it.
fn index(code: i32, state: usize) -> i32 {
    let code = if state.is_multiple_of(2) { code } else { -code };
    assert_eq!(code.rem_euclid(4), 1, "{code} in state {state}");
    code >> 2
}

/// The cost of a lane's codes, which are checked to follow a path.
fn cost(units: &[f32], codes: &[i32], lengths: &[f32], price: f64) -> f64 {
    let (mut state, mut sum) = (0, 0.0);
    for (&unit, &code) in units.iter().zip(codes) {
        let index = index(code, state);
        let place = index + lengths.len() as i32 / 2;
        let bits = usize::try_from(place)
            .ok()
            .and_then(|place| lengths.get(place))
            .copied()
            .unwrap_or(0.0);
        sum += f64::from(unit - code as f32).powi(2) + 16.0 * price * f64::from(bits);
        state = NEXT[2 * state + (index & 1) as usize].into();
    }
    sum
}

/// The lowest cost of all paths; each weight takes the cheapest of all codes of its set.
fn least(units: &[f32], lengths: &[f32], price: f64) -> f64 {
    let middle = lengths.len() as i32 / 2;
    let paths = (0..1usize << units.len()).map(|path| {
        let (mut state, mut sum) = (0, 0.0);
        for (column, &unit) in units.iter().enumerate() {
            let parity = path >> column & 1;
            let unit = f64::from(if state % 2 == 0 { unit } else { -unit });
            let indices = (-middle..=middle).filter(|index| (index & 1) as usize == parity);
            let costs = indices.map(|index| {
                let bits = f64::from(lengths[(index + middle) as usize]);
                (unit - f64::from(4 * index + 1)).powi(2) + 16.0 * price * bits
            });
            sum += costs.fold(f64::INFINITY, f64::min);
            state = usize::from(NEXT[2 * state + parity]);
        }
        sum
    });
    paths.fold(f64::INFINITY, f64::min)
}

fn lane<T: Copy>(row: &[T], lane: usize) -> Vec<T> {
    row.iter().skip(lane).step_by(LANES).copied().collect()
}

#[test]
fn rounding_finds_the_cheapest_of_all_paths() {
    let lengths = lengths(INDICES);
    for columns in (1..16).chain([31, 40]) {
        let weights = weights(19 * columns, 1.0);
        for price in [0.0, 0.01, 0.2] {
            let codes = rounded(problem(&weights, columns, &lengths, price), Isa::SCALAR).unwrap();
            for (weights, codes) in weights.chunks(columns).zip(codes.chunks(columns)) {
                for number in 0..LANES {
                    let units: Vec<f32> = lane(weights, number)
                        .iter()
                        .map(|weight| weight * (4.0 / 0.7))
                        .collect();
                    let (found, least) = (
                        cost(&units, &lane(codes, number), &lengths, price),
                        least(&units, &lengths, price),
                    );
                    // Cells are a quarter of a unit wide.
                    assert!(
                        found <= least + 1e-3 + 0.02 * units.len() as f64,
                        "{found} instead of {least}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_rounds_identically() {
    let lengths: Vec<f32> = (0..128).flat_map(|_| lengths(INDICES)).collect();
    for (rows, columns) in [(1, 1), (3, 5), (17, 6), (40, 303), (16, 64), (32, 1027)] {
        let mut weights = weights(rows * columns, 3.0);
        for place in (0..weights.len()).step_by(97) {
            weights[place] *= 1e3;
        }
        let wanted = rounded(problem(&weights, columns, &lengths, 0.01), Isa::SCALAR).unwrap();
        for isa in isas() {
            assert!(
                rounded(problem(&weights, columns, &lengths, 0.01), isa).unwrap() == wanted,
                "{}",
                isa.name()
            );
        }
    }
}

#[test]
fn far_weights_become_the_nearest_codes() {
    let lengths = lengths(INDICES);
    for far in [1e6, -1e6, 1e30, f32::MAX, 22.3, -21.9] {
        let mut weights = weights(64, 1.0);
        weights[21] = far;
        let codes = rounded(problem(&weights, 64, &lengths, 0.01), Isa::SCALAR).unwrap();
        let wanted = (f64::from(far) * 4.0 / 0.7).clamp(-(1 << 30) as f64, (1 << 30) as f64);
        assert!(
            (f64::from(codes[21]) - wanted).abs() <= 8.0 + wanted.abs() * 1e-6,
            "{far} became {}",
            codes[21]
        );
        assert!((0..LANES).all(|number| cost(&[0.0; 16], &lane(&codes, number), &lengths, 0.0) > 0.0));
    }
}

#[test]
fn narrow_types_have_the_low_bits_and_bad_input_is_refused() {
    let (lengths, isa, pool) = (lengths(INDICES), Isa::SCALAR, pool::current().unwrap());
    let ok = Problem {
        step: 4.0,
        ..problem(&[100.0, -120.0], 2, &lengths, 0.0)
    };
    let mut bytes = [0i8; 2];
    assert_eq!(round(ok, &mut bytes, isa, &pool), Ok(119));
    assert_eq!(bytes, [101, -119]);
    let finer = Problem { step: 2.0, ..ok };
    let (wide, largest) = (rounded(finer, isa).unwrap(), round(finer, &mut bytes, isa, &pool));
    assert_eq!(largest, Ok(wide.iter().map(|code| code.abs()).max().unwrap()));
    assert!(largest.unwrap() > 127 && bytes.iter().zip(&wide).all(|(&byte, &code)| byte == code as i8));
    assert_eq!(
        round::<i8>(problem(&[], 0, &lengths, 0.0), &mut [], isa, &pool),
        Ok(0)
    );
    assert!(round(ok, &mut [0i8; 3], isa, &pool).is_err());
    let bad = [
        problem(&[1.0, f32::NAN], 2, &lengths, 0.0),
        problem(&[1.0, f32::INFINITY], 2, &lengths, 0.0),
        Problem { step: f64::NAN, ..ok },
        Problem { integers: 1, ..ok },
        Problem {
            integers: 127,
            lengths: &[0.0; 127],
            ..ok
        },
    ];
    assert!(bad.into_iter().all(|problem| rounded(problem, isa).is_err()));
}

/// Owned matrices, for [`Matrices`].
struct Owned {
    shape: [usize; 3],
    weights: Vec<f32>,
    upper: Vec<f32>,
    pivots: Vec<f32>,
    prices: Vec<f32>,
    lengths: Vec<f32>,
    runs: Vec<i64>,
}

impl Owned {
    fn new(shape: [usize; 3], coupling: f32) -> Owned {
        let ([experts, rows, columns], mut random) = (shape, Random(5));
        let place = |i: usize| (i / columns % columns, i % columns);
        let upper = (0..experts * columns * columns).map(|i| match place(i) {
            (row, column) if row == column => 1.0,
            (row, column) if row < column => random.normal(coupling),
            _ => 0.0,
        });
        Owned {
            shape,
            upper: upper.collect(),
            weights: weights(experts * rows * columns, 1.0),
            pivots: (0..experts * columns)
                .map(|i| 0.5 + (i % 7) as f32 / 6.0)
                .collect(),
            prices: (0..experts).map(|expert| 0.01 * expert as f32).collect(),
            lengths: (0..3)
                .flat_map(|run| {
                    lengths(INDICES + 2)
                        .into_iter()
                        .map(move |bits| bits + run as f32)
                })
                .collect(),
            runs: (0..experts * rows).map(|row| (row / 5 % 3) as i64).collect(),
        }
    }

    fn view(&self) -> Matrices<'_> {
        Matrices {
            shape: self.shape,
            weights: &self.weights,
            step: 0.7,
            upper: &self.upper,
            pivots: &self.pivots,
            prices: &self.prices,
            lengths: &self.lengths,
            indices: INDICES + 2,
            runs: &self.runs,
        }
    }

    /// A row's codes in the order of visits; every state keeps all codes of its path.
    fn naive(&self, expert: usize, row: usize) -> Vec<i32> {
        let [_, rows, columns] = self.shape;
        let weights = &self.weights[(expert * rows + row) * columns..][..columns];
        let list = &self.lengths[self.runs[expert * rows + row] as usize * (INDICES + 2)..][..INDICES + 2];
        let upper = |i: usize, j: usize| self.upper[(expert * columns + i) * columns + j];
        let units: Vec<f32> = (0..LANES)
            .flat_map(|number| lane(weights, number))
            .map(|w| w * (4.0 / 0.7))
            .collect();
        let (mut decided, lanes) = (
            Vec::<i32>::new(),
            [0, 1, 2, 3].map(|number| lane(weights, number).len()),
        );
        for length in lanes {
            let (mut state, end) = (0, decided.len() + length);
            while decided.len() < end {
                let mut paths: Vec<Option<(f32, Vec<i32>)>> = vec![None; STATES];
                paths[state] = Some((0.0, decided.clone()));
                for column in decided.len()..end.min(decided.len() + 32) {
                    let weight = self.pivots[expert * columns + column].powi(2);
                    let mut next: Vec<Option<(f32, Vec<i32>)>> = vec![None; STATES];
                    for parity in 0..2 {
                        for from in 0..STATES {
                            let Some((total, codes)) = &paths[from] else {
                                continue;
                            };
                            let spread = |sum: f32, (i, &code): (usize, &i32)| {
                                sum + (units[i] - code as f32) * upper(i, column)
                            };
                            let unit = codes.iter().enumerate().fold(units[column], spread);
                            let (code, cost) = self.edge(unit, weight, expert, list, from, parity);
                            let to = usize::from(NEXT[2 * from + parity]);
                            if next[to].as_ref().is_none_or(|(best, _)| total + cost < *best) {
                                next[to] = Some((total + cost, [&codes[..], &[code]].concat()));
                            }
                        }
                    }
                    paths = next;
                }
                let best = cheapest(|state| paths[state].as_ref().map_or(f32::INFINITY, |path| path.0));
                (state, decided) = (best, paths[best].clone().unwrap().1);
            }
        }
        decided
    }

    fn edge(
        &self,
        unit: f32,
        weight: f32,
        expert: usize,
        list: &[f32],
        from: usize,
        parity: usize,
    ) -> (i32, f32) {
        let sign = if from.is_multiple_of(2) { 1 } else { -1 };
        let nearest = index(cells::nearest(unit, from % 2, parity), from);
        let inner = if nearest > 0 { nearest - 2 } else { nearest + 2 };
        let [outer, inner] = [nearest, inner].map(|index| {
            let (error, middle) = (sign as f32 * unit - (4 * index + 1) as f32, list.len() as i32 / 2);
            let bits = list[(index.clamp(-middle, middle) + middle) as usize];
            (
                sign * (4 * index + 1),
                error * error * weight + 16.0 * self.prices[expert] * bits,
            )
        });
        if inner.1 < outer.1 { inner } else { outer }
    }
}

#[test]
fn every_instruction_set_follows_the_paths_with_their_own_errors() {
    for shape in [
        [2, 17, 9],
        [1, 3, 1],
        [2, 2, 3],
        [1, 70, 40],
        [1, 2, 301],
        [2, 1, 130],
    ] {
        let (owned, [_, rows, columns]) = (Owned::new(shape, 0.1), shape);
        let naive = (0..shape[0] * rows).flat_map(|row| owned.naive(row / rows, row % rows));
        let naive: Vec<i32> = naive.collect();
        let wanted = solve(owned.view(), Isa::SCALAR, &pool::current().unwrap()).unwrap();
        for (codes, naive) in wanted.codes.chunks(columns).zip(naive.chunks(columns)) {
            let visited: Vec<i32> = (0..LANES).flat_map(|number| lane(codes, number)).collect();
            assert!(visited == naive, "{shape:?}: {visited:?} {naive:?}");
        }
        for isa in isas() {
            assert!(
                solve(owned.view(), isa, &pool::current().unwrap()).as_ref() == Ok(&wanted),
                "{}",
                isa.name()
            );
        }
    }
}

#[test]
fn rows_of_many_runs_and_the_longest_lists_are_searched() {
    let (shape, pool) = ([1, 20, 50], pool::current().unwrap());
    let (mut owned, longest) = (Owned::new(shape, 0.1), lengths(127));
    owned.lengths = (0..20)
        .flat_map(|run| longest.iter().map(move |bits| bits * (1.0 + run as f32)))
        .collect();
    owned.runs = (0..20).rev().collect();
    owned.prices = vec![0.02];
    for isa in isas() {
        let found = solve(
            Matrices {
                indices: 127,
                ..owned.view()
            },
            isa,
            &pool,
        )
        .unwrap();
        for row in 0..20 {
            let alone = Owned {
                shape: [1, 1, 50],
                weights: owned.weights[row * 50..][..50].to_vec(),
                upper: owned.upper.clone(),
                pivots: owned.pivots.clone(),
                prices: owned.prices.clone(),
                lengths: owned.lengths[owned.runs[row] as usize * 127..][..127].to_vec(),
                runs: vec![0],
            };
            let alone = Matrices {
                indices: 127,
                ..alone.view()
            };
            let codes = solve(alone, Isa::SCALAR, &pool).unwrap().codes;
            assert_eq!(found.codes[row * 50..][..50], codes, "{} {row}", isa.name());
        }
    }
}

#[test]
fn without_correlation_it_is_rounding() {
    let mut owned = Owned::new([1, 33, 100], 0.0);
    owned.pivots.fill(1.0);
    let found = solve(owned.view(), Isa::SCALAR, &pool::current().unwrap()).unwrap();
    let lengths = lengths(INDICES);
    let codes = rounded(problem(&owned.weights, 100, &lengths, 0.0), Isa::SCALAR).unwrap();
    let error = |codes: &[i32]| -> f64 {
        let errors = owned
            .weights
            .iter()
            .zip(codes)
            .map(|(w, &code)| f64::from(w * (4.0 / 0.7) - code as f32).powi(2));
        errors.sum()
    };
    assert!((error(&found.codes) / error(&codes) - 1.0).abs() < 1e-3);
    assert!((found.losses.iter().sum::<f64>() / error(&found.codes) - 1.0).abs() < 1e-6);
}

#[test]
fn overflow_and_bad_matrices_are_noticed() {
    let pool = pool::current().unwrap();
    let mut owned = Owned::new([1, 4, 12], 1e30);
    owned.weights[0] = f32::MAX;
    let found = solve(owned.view(), Isa::SCALAR, &pool).unwrap();
    assert!(found.losses.iter().any(|loss| !loss.is_finite()));
    let owned = Owned::new([1, 4, 12], 0.1);
    let (ok, nan) = (owned.view(), [f32::NAN; 48]);
    let bad = [
        Matrices { weights: &nan, ..ok },
        Matrices {
            weights: &nan[1..],
            ..ok
        },
        Matrices { pivots: &[], ..ok },
        Matrices {
            runs: &[0, 1, 2, 3],
            ..ok
        },
        Matrices {
            runs: &[0, 1, 2, -1],
            ..ok
        },
        Matrices { indices: 64, ..ok },
        Matrices {
            indices: 129,
            lengths: &[0.0; 129 * 3],
            ..ok
        },
        Matrices { step: 0.0, ..ok },
    ];
    assert!(
        bad.into_iter()
            .all(|matrices| solve(matrices, Isa::SCALAR, &pool).is_err())
    );
    let empty = Matrices {
        shape: [1, 0, 12],
        weights: &[],
        runs: &[],
        ..ok
    };
    assert_eq!(
        solve(empty, Isa::SCALAR, &pool),
        Ok(Solved {
            codes: vec![],
            losses: vec![0.0; 12]
        })
    );
}

#[test]
fn cells_list_the_cheapest_codes() {
    let lengths = lengths(INDICES);
    let cells = Cells::new(&lengths, 0.05);
    for number in -140..=140 {
        let unit = number as f32 * 0.25;
        let (mut units, mut places) = ([0.0; SEQUENCES], [0; SEQUENCES]);
        units[0] = unit;
        let edges = cells.edges(&units, &mut places);
        for (set, edges) in edges.iter().enumerate() {
            let code = cells.code(places[0], set / 2, set % 2);
            let own = cost_of(unit, code, set, &lengths);
            let all = (-31..=31).filter(|index| (index & 1) as usize == set % 2);
            let least = all.map(|index| {
                let code = if set < 2 { 4 * index + 1 } else { -(4 * index + 1) };
                cost_of(unit, code, set, &lengths)
            });
            assert!(own <= least.fold(f64::INFINITY, f64::min) + 1e-4);
            assert!(
                (f64::from(edges[0]) - own).abs() < 1e-3 * (1.0 + own),
                "{unit} {code}: {} {own}",
                edges[0]
            );
        }
    }
}

fn cost_of(unit: f32, code: i32, set: usize, lengths: &[f32]) -> f64 {
    let bits = lengths[(index(code, set / 2) + 31) as usize];
    f64::from(unit - code as f32).powi(2) + 0.8 * f64::from(bits)
}
