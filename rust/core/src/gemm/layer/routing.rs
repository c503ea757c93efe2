//! The routing of tokens to experts.

use std::ops::Range;

use crate::types::Activations;
use crate::{Error, Result};

/// The experts of each token, `top_k` per token.
#[derive(Debug, Clone, Copy)]
pub struct Routing<'a> {
    /// Experts, tokens x top_k; numbers that are not valid experts are skipped.
    pub experts: &'a [i64],
    /// The weights of the experts' outputs, tokens x top_k.
    pub weights: &'a [f32],
    /// The number of experts per token.
    pub top_k: usize,
}

impl Routing<'_> {
    /// Checks that a call's activations and outputs, tokens x `columns` each, match the routed tokens.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they do not.
    pub(crate) fn check(&self, columns: usize, x: &Activations, y: &[f32]) -> Result<()> {
        let tokens = self.experts.len() / self.top_k.max(1);
        let fits = tokens * self.top_k == self.experts.len()
            && self.weights.len() == self.experts.len()
            && tokens.checked_mul(columns) == Some(x.len())
            && y.len() == x.len();
        match fits {
            true => Ok(()),
            false => Err(Error::InvalidArgument(format!(
                "{} activations, {} outputs, {} experts, {} weights, {} experts per token",
                x.len(),
                y.len(),
                self.experts.len(),
                self.weights.len(),
                self.top_k
            ))),
        }
    }
}

/// One expert's share of a call: a range of places in the call's list of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The expert.
    pub expert: usize,
    /// Its places; at least one.
    pub places: Range<usize>,
}

/// The pairs of a token and an expert that a call multiplies, in the order of the experts. A job stands for one set
/// of activations: projections share what they prepare with others of the same job.
#[derive(Debug)]
pub struct Job {
    /// The number of tokens with activations.
    pub tokens: usize,
    /// The token at each place.
    pub list: Vec<usize>,
    /// The experts with tokens, ascending; their ranges of places are consecutive and cover the list, unless the job is
    /// part of another.
    pub tasks: Vec<Task>,
    /// Whether each token visits one of the experts; `None` if the job is not part of another.
    visits: Option<Vec<bool>>,
}

impl Job {
    /// Tokens `offsets[e]..offsets[e + 1]` go through expert e; the offsets ascend from 0.
    pub fn of_offsets(offsets: &[usize]) -> Job {
        let pairs = offsets.windows(2).enumerate();
        let tasks = pairs
            .filter(|(_, pair)| pair[0] < pair[1])
            .map(|(expert, pair)| Task {
                expert,
                places: pair[0]..pair[1],
            });
        let tasks: Vec<Task> = tasks.collect();
        Job::of_tasks(tasks)
    }

    /// A job with separate activations for every place.
    pub fn of_tasks(tasks: Vec<Task>) -> Job {
        let tokens = tasks.last().map_or(0, |task| task.places.end);
        Job {
            tokens,
            list: (0..tokens).collect(),
            tasks,
            visits: None,
        }
    }

    /// The part of a job with some of its tasks.
    pub(crate) fn part(&self, tasks: Vec<Task>) -> Job {
        let mut visits = vec![false; self.tokens];
        for &token in tasks.iter().flat_map(|task| &self.list[task.places.clone()]) {
            visits[token] = true;
        }
        Job {
            tokens: self.tokens,
            list: self.list.clone(),
            tasks,
            visits: Some(visits),
        }
    }

    /// Whether a token visits one of the experts. May be true for a token without an expert.
    pub(crate) fn has(&self, token: usize) -> bool {
        self.visits.as_ref().is_none_or(|visits| visits[token])
    }

    /// The expert of the task at a place of the list; `None` if the job is part of another and leaves the place out.
    pub(crate) fn expert_at(&self, place: usize) -> Option<usize> {
        let task = self.tasks.partition_point(|task| task.places.end <= place);
        let task = self.tasks.get(task)?;
        task.places.contains(&place).then_some(task.expert)
    }

    /// The maximum number of tokens of an expert.
    pub(crate) fn widest(&self) -> usize {
        self.tasks.iter().map(|task| task.places.len()).max().unwrap_or(0)
    }
}

/// A routing sorted by expert.
pub(crate) struct Sorted {
    pub job: Job,
    /// The place of each pair of the routing; `None` for skipped pairs.
    pub places: Vec<Option<usize>>,
}

impl Sorted {
    pub fn new(routing: &Routing, tokens: usize, experts: usize) -> Sorted {
        let mut order: Vec<(usize, usize)> = Vec::with_capacity(routing.experts.len());
        for (pair, &expert) in routing.experts.iter().enumerate() {
            let expert = usize::try_from(expert).ok().filter(|&e| e < experts);
            order.extend(expert.map(|expert| (expert, pair)));
        }
        order.sort_unstable();
        let mut tasks: Vec<Task> = Vec::new();
        let mut places = vec![None; routing.experts.len()];
        for (place, &(expert, pair)) in order.iter().enumerate() {
            places[pair] = Some(place);
            match tasks.last_mut() {
                Some(task) if task.expert == expert => task.places.end = place + 1,
                _ => tasks.push(Task {
                    expert,
                    places: place..place + 1,
                }),
            }
        }
        let list = order.iter().map(|&(_, pair)| pair / routing.top_k).collect();
        Sorted {
            job: Job {
                tokens,
                list,
                tasks,
                visits: None,
            },
            places,
        }
    }
}
